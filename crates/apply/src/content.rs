//! A digest of a change's content that is the same in every stream: it leaves out what depends on
//! the stream, such as the numbers of schemas and earlier records. Run by the appliers.
//!
//! The digest must stay the same in all releases: digests of digests are stored
//! (`braid.split_progress`).

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

    /// Returns the digest of a changed row.
    ///
    /// # Errors
    /// 08P01 if its schema is not known.
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

    /// Returns the digest of a truncate.
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
