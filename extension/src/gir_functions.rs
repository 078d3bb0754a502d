//! SQL functions that show the contents of GIR frames.

use braid_gir::{Detail, Schemas, render_frame};
use braid_postgres::encoding::Text;
use pgrx::prelude::*;

/// The records of frames, one line each, without the parts that differ from run to run. Frames of a
/// stream may be strung together: records name their columns if the schema record came before.
#[pg_extern(immutable, strict, parallel_safe)]
fn gir_records(frame: &[u8]) -> SetOfIterator<'static, Text> {
    match render_frame(frame, &mut Schemas::new(), Detail::Stable) {
        Ok(lines) => SetOfIterator::new(lines.into_iter().map(Text)),
        Err(error) => {
            ereport!(
                ERROR,
                PgSqlErrorCode::ERRCODE_DATA_CORRUPTED,
                format!("frame is not valid GIR: {error}")
            );
        }
    }
}
