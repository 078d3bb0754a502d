//! Finds libpq: the one that belongs to the PostgreSQL that the build is for.

use std::process::Command;

fn main() {
    println!("cargo:rerun-if-env-changed=PGRX_PG_CONFIG_PATH");
    let pg_config = std::env::var("PGRX_PG_CONFIG_PATH").unwrap_or_else(|_| "pg_config".to_owned());
    if let Ok(output) = Command::new(pg_config).arg("--libdir").output() {
        let libdir = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        println!("cargo:rustc-link-search=native={libdir}");
    }
}
