//! The decoder's [`Catalog`] over PostgreSQL's catalogs.

use braid_decoder::{Actions, Catalog, Error, GeneratedColumns, Publication, Result};
use braid_postgres::relation::Described;
use braid_postgres::{compat, encoding, syscache};
use pgrx::pg_sys;

/// Load publications by name.
///
/// # Errors
/// [`Error::MissingPublication`], under 16 to 18 as under 15, although the plugin of 18 only warns:
/// a subscriber that asks for a publication and silently gets nothing has lost changes. In a
/// transaction with a snapshot for catalogs.
pub(super) fn load(names: &[String]) -> Result<Vec<Publication>> {
    let mut publications = Vec::with_capacity(names.len());
    for name in names {
        let missing = || Error::MissingPublication(name.clone());
        let server_name = encoding::to_server(name).ok_or_else(missing)?;
        // SAFETY: null when it is missing, else a publication in the current memory context.
        let found = unsafe {
            pg_sys::GetPublicationByName(server_name.as_ptr(), true)
                .cast_const()
                .as_ref()
        };
        let publication = found.ok_or_else(missing)?;
        let actions = &publication.pubactions;
        let generated = compat::publishes_generated(publication);
        publications.push(Publication {
            oid: publication.oid.to_u32(),
            all_tables: publication.alltables,
            via_root: publication.pubviaroot,
            actions: Actions {
                insert: actions.pubinsert,
                update: actions.pubupdate,
                delete: actions.pubdelete,
                truncate: actions.pubtruncate,
            },
            generated: if generated {
                GeneratedColumns::Stored
            } else {
                GeneratedColumns::None
            },
        });
    }
    Ok(publications)
}

/// The catalogs at the change that is decoded.
pub(super) struct Catalogs {
    _private: (),
}

impl Catalogs {
    /// For as long as the value lives: in a transaction with a snapshot for catalogs, and a current
    /// memory context that is freed soon.
    pub(super) fn new() -> Self {
        Self { _private: () }
    }
}

fn numbers(oids: Vec<pg_sys::Oid>) -> Vec<u32> {
    oids.into_iter().map(pg_sys::Oid::to_u32).collect()
}

impl Catalog for Catalogs {
    fn table_publications(&mut self, relation: u32) -> Vec<u32> {
        numbers(syscache::publications_of_table(relation.into()))
    }

    fn excluding_publications(&mut self, relation: u32) -> Vec<u32> {
        numbers(syscache::publications_without(relation.into()))
    }

    fn schema_publications(&mut self, relation: u32) -> Vec<u32> {
        numbers(syscache::publications_of_schema(relation.into()))
    }

    fn ancestors(&mut self, relation: u32) -> Vec<u32> {
        numbers(syscache::ancestors(relation.into()))
    }

    fn name(&mut self, relation: u32) -> (String, String) {
        syscache::relation_name(relation.into())
    }

    fn column_list(&mut self, publication: u32, relation: u32) -> Option<Vec<i16>> {
        let list = compat::ANUM_PRATTRS;
        // An int2vector: its elements are behind its header.
        let vector = publication_rel(publication, relation, list)?;
        let (elements, _) = vector.get(VECTOR_HEAD..)?.as_chunks::<2>();
        let mut numbers: Vec<i16> = elements
            .iter()
            .map(|raw| i16::from_ne_bytes(*raw))
            .collect();
        numbers.sort_unstable();
        Some(numbers)
    }

    fn row_filter(&mut self, publication: u32, relation: u32) -> Option<String> {
        let filter = compat::ANUM_PRQUAL;
        // The text stays in the server's encoding, in which it is read back. Node trees are ASCII,
        // but for constants of user types, which they hold as numbers.
        let text = publication_rel(publication, relation, filter)?;
        Some(String::from_utf8_lossy(&text).into_owned())
    }

    fn all_columns(&mut self, relation: u32, generated: GeneratedColumns) -> (Vec<i16>, bool) {
        let Some(relation) = Described::find(relation.into()) else {
            return (Vec::new(), false);
        };
        let (mut columns, mut any_stored) = (Vec::new(), false);
        for attribute in relation.view().descriptor().iter() {
            if attribute.is_dropped() {
                continue;
            }
            any_stored |= attribute.is_stored_generated();
            let sent = !attribute.is_generated()
                || (attribute.is_stored_generated() && generated == GeneratedColumns::Stored);
            if sent {
                columns.push(attribute.number());
            }
        }
        (columns, any_stored)
    }
}

/// Bytes of an int2vector's header behind its length: `ndim`, `dataoffset`, `elemtype`, `dim1` and
/// `lbound1` of src/include/c.h, 15 to 18.
const VECTOR_HEAD: usize = 20;

/// The content of one attribute of a row of pg_publication_rel, without its header; `None` if the
/// row does not exist or the attribute is null. In a transaction with a snapshot for catalogs.
fn publication_rel(publication: u32, relation: u32, attribute: i16) -> Option<Vec<u8>> {
    let cache = compat::cache_number(pg_sys::SysCacheIdentifier::PUBLICATIONRELMAP);
    let relation = pg_sys::Oid::from(relation);
    let publication = pg_sys::Oid::from(publication);
    // SAFETY: the cache takes both OIDs. The attributes that are asked for are of variable length;
    // the value is copied before the row is released.
    unsafe {
        let tuple = pg_sys::SearchSysCache2(cache, relation.into(), publication.into());
        if tuple.is_null() {
            return None;
        }
        let mut is_null = false;
        let datum = pg_sys::SysCacheGetAttr(cache, tuple, attribute, &raw mut is_null);
        let content = (!is_null).then(|| {
            let packed = pg_sys::pg_detoast_datum_packed(datum.cast_mut_ptr());
            pgrx::varlena_to_byte_slice(packed).to_vec()
        });
        pg_sys::ReleaseSysCache(tuple);
        content
    }
}
