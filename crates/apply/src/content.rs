//! A hash of what a change holds, for whoever has to know it again in another stream: without what
//! depends on the stream, as the numbers of its schemas, or on what was sent before. Run by the
//! appliers.
//!
//! It must stay as it is: hashes of hashes are stored (`braid.split_progress`).

use braid_decoder::KeyHasher;
use braid_gir::{Change, Image, Operation, Truncate};
use braid_postgres::error::PgError;

use super::Session;

fn feed(hasher: &mut KeyHasher, image: Option<&Image<'_>>) {
    let Some(image) = image else {
        hasher.word(u64::MAX);
        return;
    };
    hasher.word(u64::from(image.columns()));
    hasher.bytes(image.bytes());
}

impl Session {
    fn feed_name(&self, hasher: &mut KeyHasher, schema: u32) -> Result<(), PgError> {
        let remote = self.remote(schema)?;
        hasher.bytes(remote.namespace.as_bytes());
        hasher.bytes(remote.name.as_bytes());
        Ok(())
    }

    /// Of a changed row.
    ///
    /// # Errors
    /// 08P01 when its schema is not known.
    pub fn content(&self, change: &Change<'_>) -> Result<u64, PgError> {
        let mut hasher = KeyHasher::new(match change.operation {
            Operation::Insert => 1,
            Operation::Update => 2,
            Operation::Delete => 3,
        });
        self.feed_name(&mut hasher, change.header.schema.0)?;
        feed(&mut hasher, change.before.as_ref());
        feed(&mut hasher, change.after.as_ref());
        Ok(hasher.finish())
    }

    /// Of a truncate.
    ///
    /// # Errors
    /// As [`Session::content`].
    pub fn content_of_truncate(&self, truncate: &Truncate<'_>) -> Result<u64, PgError> {
        let mut hasher = KeyHasher::new(4);
        hasher.word(u64::from(truncate.restart_identity));
        for schema in truncate.schemas() {
            self.feed_name(&mut hasher, schema.0)?;
        }
        Ok(hasher.finish())
    }
}
