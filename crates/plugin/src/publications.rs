//! The decoder's [`Catalog`] over PostgreSQL's catalogs.

use std::ffi::CStr;

use braid_decoder::{Actions, Catalog, Error, GeneratedColumns, Publication, Result};
use braid_postgres::{compat, encoding, ffi};
use pgrx::pg_sys;

/// Attribute numbers of pg_publication_rel (src/include/catalog/pg_publication_rel.h, 15 to 18).
const ANUM_PRQUAL: i16 = 4;
/// See [`ANUM_PRQUAL`].
const ANUM_PRATTRS: i16 = 5;

/// Load publications by name.
///
/// # Errors
/// [`Error::MissingPublication`], under 16 to 18 as under 15, although the plugin of 18 only warns: a subscriber that asks for
/// a publication and silently gets nothing has lost changes.
///
/// # Safety
/// In a transaction with a snapshot for catalogs.
pub(super) unsafe fn load(names: &[String]) -> Result<Vec<Publication>> {
    let mut publications = Vec::with_capacity(names.len());
    for name in names {
        let missing = || Error::MissingPublication(name.clone());
        let server_name = encoding::to_server(name).ok_or_else(missing)?;
        // SAFETY: as the caller says; null when it is missing.
        let found = unsafe { pg_sys::GetPublicationByName(server_name.as_ptr(), true) };
        if found.is_null() {
            return Err(missing());
        }
        // SAFETY: not null, so a publication in the current memory context.
        let (publication, actions, generated) = unsafe {
            (
                &*found,
                &(*found).pubactions,
                compat::publishes_generated(found),
            )
        };
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
    /// # Safety
    /// For as long as the value lives: in a transaction with a snapshot for catalogs, and a current memory context that is
    /// freed soon.
    pub(super) unsafe fn new() -> Self {
        Self { _private: () }
    }
}

/// OIDs of a list.
///
/// # Safety
/// `list` is null or a list of OIDs.
pub unsafe fn oids(list: *const pg_sys::List) -> Vec<u32> {
    if list.is_null() {
        return Vec::new();
    }
    // SAFETY: a list has `length` cells, of OIDs as the caller says.
    unsafe {
        let len = usize::try_from((*list).length).unwrap_or_default();
        let cells = std::slice::from_raw_parts((*list).elements, len);
        cells.iter().map(|cell| cell.oid_value.to_u32()).collect()
    }
}

impl Catalog for Catalogs {
    fn table_publications(&mut self, relation: u32) -> Vec<u32> {
        // SAFETY: what `new` asks for.
        unsafe { oids(pg_sys::GetRelationPublications(relation.into())) }
    }

    fn schema_publications(&mut self, relation: u32) -> Vec<u32> {
        // SAFETY: what `new` asks for.
        unsafe {
            oids(pg_sys::GetSchemaPublications(pg_sys::get_rel_namespace(
                relation.into(),
            )))
        }
    }

    fn ancestors(&mut self, relation: u32) -> Vec<u32> {
        // SAFETY: what `new` asks for.
        unsafe { oids(ffi::get_partition_ancestors(relation.into())) }
    }

    fn name(&mut self, relation: u32) -> (String, String) {
        // SAFETY: what `new` asks for.
        unsafe {
            let namespace = pg_sys::get_namespace_name(pg_sys::get_rel_namespace(relation.into()));
            let name = pg_sys::get_rel_name(relation.into());
            (
                encoding::from_server(namespace),
                encoding::from_server(name),
            )
        }
    }

    fn column_list(&mut self, publication: u32, relation: u32) -> Option<Vec<i16>> {
        let list = ANUM_PRATTRS;
        // SAFETY: what `new` asks for; prattrs is an int2vector. The bitmap set is in the current memory context.
        unsafe {
            let datum = publication_rel(publication, relation, list)?;
            let columns =
                pg_sys::pub_collist_to_bitmapset(std::ptr::null_mut(), datum, std::ptr::null_mut());
            let mut numbers = Vec::new();
            let mut member = pg_sys::bms_next_member(columns, -1);
            while member >= 0 {
                numbers.extend(i16::try_from(member).ok());
                member = pg_sys::bms_next_member(columns, member);
            }
            Some(numbers)
        }
    }

    fn row_filter(&mut self, publication: u32, relation: u32) -> Option<String> {
        let filter = ANUM_PRQUAL;
        // SAFETY: what `new` asks for; prqual is a pg_node_tree, which is text. It stays in the server's encoding, in which it
        // is read back; node trees are ASCII but for constants of user types, which they hold as numbers.
        unsafe {
            let datum = publication_rel(publication, relation, filter)?;
            let text = pg_sys::text_to_cstring(datum.cast_mut_ptr());
            Some(CStr::from_ptr(text).to_string_lossy().into_owned())
        }
    }

    fn all_columns(&mut self, relation: u32, generated: GeneratedColumns) -> (Vec<i16>, bool) {
        // SAFETY: what `new` asks for; the relation is closed after its last use.
        unsafe {
            let relation = pg_sys::RelationIdGetRelation(relation.into());
            if relation.is_null() {
                return (Vec::new(), false);
            }
            let descriptor = (*relation).rd_att;
            let natts = usize::try_from((*descriptor).natts).unwrap_or_default();
            let (mut columns, mut any_stored) = (Vec::with_capacity(natts), false);
            for index in 0..natts {
                let attribute = &*compat::TupleDescAttr(descriptor, index);
                let kind = attribute.attgenerated.cast_unsigned();
                if attribute.attisdropped {
                    continue;
                }
                any_stored |= kind == pg_sys::ATTRIBUTE_GENERATED_STORED;
                let sent = kind == 0
                    || (kind == pg_sys::ATTRIBUTE_GENERATED_STORED
                        && generated == GeneratedColumns::Stored);
                if sent {
                    columns.push(attribute.attnum);
                }
            }
            pg_sys::RelationClose(relation);
            (columns, any_stored)
        }
    }
}

/// One attribute of a row of pg_publication_rel, copied; `None` when the row is not there or the attribute is null.
///
/// # Safety
/// In a transaction with a snapshot for catalogs.
unsafe fn publication_rel(
    publication: u32,
    relation: u32,
    attribute: i16,
) -> Option<pg_sys::Datum> {
    let cache = pg_sys::SysCacheIdentifier::PUBLICATIONRELMAP.cast_signed();
    let relation = pg_sys::Oid::from(relation);
    let publication = pg_sys::Oid::from(publication);
    // SAFETY: as the caller says; the value is copied before the row is released.
    unsafe {
        let tuple = pg_sys::SearchSysCache2(cache, relation.into(), publication.into());
        if tuple.is_null() {
            return None;
        }
        let mut is_null = false;
        let datum = pg_sys::SysCacheGetAttr(cache, tuple, attribute, &raw mut is_null);
        let copy = (!is_null)
            .then(|| pg_sys::Datum::from(pg_sys::pg_detoast_datum_copy(datum.cast_mut_ptr())));
        pg_sys::ReleaseSysCache(tuple);
        copy
    }
}
