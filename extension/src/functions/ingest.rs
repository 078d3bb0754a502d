//! Records of other systems.

use std::ffi::CStr;

use braid_node::read_only;
use braid_postgres::jsonb::Jsonb;
use braid_workers::ingest::{Request, forget, ingest as apply};
use pgrx::datum::AnyElement;
use pgrx::iter::TableIterator;
use pgrx::prelude::*;

use super::failure::Failure;
use super::node::check_name;
use super::{local, required, required_name, run, server, versions};

/// braid.ingest(gir jsonb, origin name)
#[pg_extern(sql = false)]
fn ingest(
    gir: Option<AnyElement>,
    origin: Option<&CStr>,
) -> TableIterator<'static, (name!(applied, i64), name!(skipped, i64))> {
    let done = run(|| {
        let node = local::require_node()?;
        // Rows of sources outside of the group count as a user's writes.
        if let Err(error) = read_only::check() {
            error.raise();
        }
        server::check_for_subscription()?;
        versions::check_none("ingest changes")?;
        let gir = required(gir, "gir")?;
        let origin = origin.map(braid_postgres::catalog::utf8_string);
        if let Some(origin) = &origin {
            check_name(origin, "origin")?;
        }
        let request = Request {
            // SAFETY: the function declares the argument as jsonb, and the value outlives the call.
            gir: unsafe { Jsonb::new(gir.datum()) },
            source: origin.as_deref(),
            local_node: &node.name,
        };
        Ok(match apply(&request) {
            Ok(done) => done,
            Err(error) => error.raise(),
        })
    });
    TableIterator::once((
        i64::try_from(done.applied).unwrap_or(i64::MAX),
        i64::try_from(done.skipped).unwrap_or(i64::MAX),
    ))
}

/// braid.forget_source(source_name name)
#[pg_extern(sql = false)]
fn forget_source(source_name: Option<&CStr>) {
    run(|| {
        let name = required_name(source_name, "source_name")?;
        match forget(&name) {
            Ok(true) => Ok(()),
            Ok(false) => Err(
                Failure::undefined(format!("source \"{name}\" does not exist")).hint(
                    "The view braid.ingest_sources lists the sources whose records were ingested here.",
                ),
            ),
            Err(error) => error.raise(),
        }
    });
}
