//! The two hashes of routing: `h1` of the tenant, `h2` of the record.
//!
//! FNV-1a with 64 bits, then the finalizer of MurmurHash3 (`docs/routing-hash.md` says why). A
//! first byte separates the two functions: `T` before a tenant's canonical bytes, `R` before a
//! record's. So both hashes of one value have nothing to do with each other.

use std::fmt;

use crate::key::{HashError, Key, Sink, has_class};

/// The version of canonical bytes and hash. Rows of a table stay where its version puts them.
pub const HASH_VERSION: u8 = 1;

/// The longest tenant of a rule, in canonical bytes.
pub const TENANT_LIMIT: usize = 512;

pub(crate) struct Fnv(pub(crate) u64);

impl Fnv {
    /// `domain` is the first byte.
    pub(crate) fn new(domain: u8) -> Self {
        let mut fnv = Self(0xcbf2_9ce4_8422_2325);
        fnv.put(&[domain]);
        fnv
    }

    pub(crate) fn finish(self) -> u64 {
        let mut hash = self.0;
        hash ^= hash >> 33;
        hash = hash.wrapping_mul(0xff51_afd7_ed55_8ccd);
        hash ^= hash >> 33;
        hash = hash.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
        hash ^ (hash >> 33)
    }
}

impl Sink for Fnv {
    fn put(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
}

/// `h1`: the hash of a tenant. Rules know tenants by it.
///
/// Two tenants with one hash share the spread that a rule gives to either. All nodes see it so, and
/// rows are found. The chance that two of a thousand million tenants have one hash is below 3 %.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TenantHash(pub u64);

impl TenantHash {
    /// The hash of canonical bytes.
    #[must_use]
    pub fn of_canonical(bytes: &[u8]) -> Self {
        let mut fnv = Fnv::new(b'T');
        fnv.put(bytes);
        Self(fnv.finish())
    }

    /// The hash of a value of the tenant expression.
    #[must_use]
    pub fn of(tenant: &Key<'_>) -> Self {
        let mut fnv = Fnv::new(b'T');
        tenant.write(&mut fnv);
        Self(fnv.finish())
    }
}

/// `h2`: the hash of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RecordHash(pub u64);

impl RecordHash {
    /// The hash of canonical bytes.
    #[must_use]
    pub fn of_canonical(bytes: &[u8]) -> Self {
        let mut fnv = Fnv::new(b'R');
        fnv.put(bytes);
        Self(fnv.finish())
    }

    /// The hash of a value of the record expression.
    #[must_use]
    pub fn of(record: &Key<'_>) -> Self {
        let mut fnv = Fnv::new(b'R');
        record.write(&mut fnv);
        Self(fnv.finish())
    }
}

/// A tenant in an entry of the log, by its canonical bytes: at most [`TENANT_LIMIT`].
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tenant(Vec<u8>);

impl Tenant {
    /// The tenant with this value.
    ///
    /// # Errors
    /// [`HashError::Tenant`] if the canonical bytes are more than [`TENANT_LIMIT`].
    pub fn new(tenant: &Key<'_>) -> Result<Self, HashError> {
        Self::from_canonical(&tenant.canonical())
    }

    /// The tenant with these canonical bytes.
    ///
    /// # Errors
    /// [`HashError::Tenant`] if they are too many, or begin with no class's letter.
    pub fn from_canonical(bytes: &[u8]) -> Result<Self, HashError> {
        if bytes.len() <= TENANT_LIMIT && has_class(bytes) {
            Ok(Self(bytes.to_vec()))
        } else {
            Err(HashError::Tenant)
        }
    }

    /// The canonical bytes.
    #[must_use]
    pub fn canonical(&self) -> &[u8] {
        &self.0
    }

    /// The tenant's hash.
    #[must_use]
    pub fn tenant_hash(&self) -> TenantHash {
        TenantHash::of_canonical(&self.0)
    }
}

/// As a user writes the tenant: without the class, a uuid and bytes in hexadecimal digits.
impl fmt::Display for Tenant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((class, value)) = self.0.split_first() else {
            return Ok(());
        };
        match class {
            b'u' => {
                for (place, byte) in value.iter().enumerate() {
                    if [4, 6, 8, 10].contains(&place) {
                        f.write_str("-")?;
                    }
                    write!(f, "{byte:02x}")?;
                }
                Ok(())
            }
            b'x' => {
                f.write_str("\\x")?;
                value.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
            }
            _ => f.write_str(&String::from_utf8_lossy(value)),
        }
    }
}

impl fmt::Debug for Tenant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tenant(\"{}\")", self.0.escape_ascii())
    }
}

#[cfg(test)]
mod tests {
    use super::{RecordHash, Tenant, TenantHash};
    use crate::key::Key;

    #[test]
    fn tenants_are_shown_as_users_write_them() {
        let shown = |key: Key<'_>| Tenant::new(&key).unwrap().to_string();
        assert_eq!(shown(Key::Integer(-42)), "-42");
        assert_eq!(shown(Key::Text("acme ltd")), "acme ltd");
        assert_eq!(shown(Key::Bytes(&[0, 255])), "\\x00ff");
        assert_eq!(shown(Key::Bool(true)), "t");
        assert_eq!(
            shown(Key::Uuid([
                0x01, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef, 1, 2, 3, 4, 5, 6, 7, 8
            ])),
            "01234567-89ab-cdef-0102-030405060708"
        );
    }

    #[test]
    fn canonical_bytes_have_the_hash_of_their_value() {
        for key in [Key::Integer(7), Key::Text("seven")] {
            let bytes = key.canonical();
            assert_eq!(TenantHash::of_canonical(&bytes), TenantHash::of(&key));
            assert_eq!(RecordHash::of_canonical(&bytes), RecordHash::of(&key));
        }
    }
}
