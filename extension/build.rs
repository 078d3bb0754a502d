//! Lets the loaded library find libpq when PostgreSQL is installed in a place of its own.

use std::process::Command;

fn main() {
    println!("cargo:rerun-if-env-changed=PGRX_PG_CONFIG_PATH");
    let pg_config = std::env::var("PGRX_PG_CONFIG_PATH").unwrap_or_else(|_| "pg_config".to_owned());
    if let Ok(output) = Command::new(pg_config).arg("--libdir").output() {
        let libdir = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        if !libdir.starts_with("/usr/lib") {
            println!("cargo:rustc-link-arg-cdylib=-Wl,-rpath,{libdir}");
        }
    }
}
