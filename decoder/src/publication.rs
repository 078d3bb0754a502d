//! How the changes of a relation are published: which operations, under which name, which columns
//! and rows.
//!
//! The semantics are those of PostgreSQL's own plugin (src/backend/replication/pgoutput/pgoutput.c,
//! 15 to 18: `get_rel_sync_entry`, `pgoutput_row_filter_init`, `pgoutput_column_list_init`). So a
//! publication means the same to every subscriber. One difference: the extension's own schema is
//! never published.

use crate::error::{Error, Result};

/// The extension's schema.
const OWN_SCHEMA: &str = "braid";

/// Operations that a publication publishes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Actions {
    /// INSERT.
    pub insert: bool,
    /// UPDATE.
    pub update: bool,
    /// DELETE.
    pub delete: bool,
    /// TRUNCATE.
    pub truncate: bool,
}

impl Actions {
    fn add(&mut self, other: Self) {
        self.insert |= other.insert;
        self.update |= other.update;
        self.delete |= other.delete;
        self.truncate |= other.truncate;
    }

    fn any_row(self) -> bool {
        self.insert || self.update || self.delete
    }
}

/// Whether a publication without a column list sends generated columns
/// (`publish_generated_columns`, since 18).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum GeneratedColumns {
    /// Generated columns are not sent.
    #[default]
    None,
    /// Stored generated columns are sent.
    Stored,
}

/// A publication.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Publication {
    /// OID of the publication.
    pub oid: u32,
    /// FOR ALL TABLES.
    pub all_tables: bool,
    /// `publish_via_partition_root`.
    pub via_root: bool,
    /// Published operations.
    pub actions: Actions,
    /// Treatment of generated columns.
    pub generated: GeneratedColumns,
}

/// Facts about a relation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RelationFacts {
    /// OID of the relation.
    pub oid: u32,
    /// The relation is a partition.
    pub is_partition: bool,
    /// The relation is a partitioned table, which has no rows of its own.
    pub is_partitioned: bool,
}

/// Port: the catalogs, as of the change that is decoded. Errors unwind.
pub trait Catalog {
    /// Returns the publications that list `relation`.
    fn table_publications(&mut self, relation: u32) -> Vec<u32>;
    /// Returns the publications of all tables with `relation` in their EXCEPT list; it is no
    /// partition (since 19).
    fn excluding_publications(&mut self, relation: u32) -> Vec<u32>;
    /// Returns the publications that list the schema of `relation`.
    fn schema_publications(&mut self, relation: u32) -> Vec<u32>;
    /// Returns the ancestors of a partition, its parent first.
    fn ancestors(&mut self, relation: u32) -> Vec<u32>;
    /// Returns schema and name of `relation`.
    fn name(&mut self, relation: u32) -> (String, String);
    /// Returns the attribute numbers in the column list that `publication` has for `relation`, if
    /// any.
    fn column_list(&mut self, publication: u32, relation: u32) -> Option<Vec<i16>>;
    /// Returns the row filter that `publication` has for `relation`.
    fn row_filter(&mut self, publication: u32, relation: u32) -> Option<String>;
    /// Returns the attribute numbers of all columns of `relation` that a publication without a list
    /// sends, and whether the relation has stored generated columns at all.
    fn all_columns(&mut self, relation: u32, generated: GeneratedColumns) -> (Vec<i16>, bool);
}

/// Row filter for one operation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Filter {
    /// Every row passes.
    #[default]
    All,
    /// A row passes if one of these expressions is true for it.
    AnyOf(Vec<String>),
}

/// Attribute numbers of the columns that are sent, sorted. The numbers are those of the relation
/// under whose name they are sent.
pub type Columns = Vec<i16>;

/// How changes of a relation are published.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Publishing {
    /// Operations; all false if the relation is not published.
    pub actions: Actions,
    /// The relation under whose name changes are sent: itself or an ancestor.
    pub publish_as: u32,
    /// Columns that are sent.
    pub columns: Columns,
    /// Filter for inserts.
    pub insert_filter: Filter,
    /// Filter for updates.
    pub update_filter: Filter,
    /// Filter for deletes.
    pub delete_filter: Filter,
}

/// Decides how `relation` is published by `publications`.
///
/// # Errors
/// [`Error::ColumnLists`] and [`Error::GeneratedColumns`] if publications contradict each other.
pub fn publishing(
    relation: &RelationFacts,
    publications: &[Publication],
    catalog: &mut impl Catalog,
) -> Result<Publishing> {
    let mut decision = Publishing {
        publish_as: relation.oid,
        ..Publishing::default()
    };
    if catalog.name(relation.oid).0 == OWN_SCHEMA {
        return Ok(decision);
    }
    let ancestors = if relation.is_partition {
        catalog.ancestors(relation.oid)
    } else {
        Vec::new()
    };
    let mut own = catalog.table_publications(relation.oid);
    own.extend(catalog.schema_publications(relation.oid));

    let mut level = 0;
    let mut chosen: Vec<&Publication> = Vec::new();
    for publication in publications {
        let Some((publish_as, publish_level)) =
            published_as(relation, publication, &own, &ancestors, catalog)
        else {
            continue;
        };
        // The partitions' changes are published, so those of a partitioned table only matter if
        // changes are published via the root.
        if relation.is_partitioned && !publication.via_root {
            continue;
        }
        decision.actions.add(publication.actions);
        // The topmost ancestor of all publications wins, with the filters and lists of the
        // publications that chose it.
        if publish_level < level {
            continue;
        }
        if publish_level > level {
            level = publish_level;
            decision.publish_as = publish_as;
            chosen.clear();
        }
        chosen.push(publication);
    }
    if decision.publish_as != relation.oid && catalog.name(decision.publish_as).0 == OWN_SCHEMA {
        decision.actions = Actions::default();
    }
    if decision.actions.any_row() {
        choose_filters(&mut decision, &chosen, catalog);
        decision.columns = choose_columns(decision.publish_as, &chosen, catalog)?;
    } else if decision.actions.truncate {
        decision.columns = catalog
            .all_columns(decision.publish_as, GeneratedColumns::None)
            .0;
    }
    Ok(decision)
}

/// Returns the relation under which `publication` publishes `relation`, and how many levels above
/// it that is.
fn published_as(
    relation: &RelationFacts,
    publication: &Publication,
    own: &[u32],
    ancestors: &[u32],
    catalog: &mut impl Catalog,
) -> Option<(u32, usize)> {
    if publication.all_tables {
        // A table is excluded with all its partitions.
        let root = *ancestors.last().unwrap_or(&relation.oid);
        if catalog
            .excluding_publications(root)
            .contains(&publication.oid)
        {
            return None;
        }
        return match ancestors.last() {
            Some(root) if publication.via_root => Some((*root, ancestors.len())),
            _ => Some((relation.oid, 0)),
        };
    }
    let listed = ancestors.iter().enumerate().rev().find(|(_, ancestor)| {
        catalog
            .table_publications(**ancestor)
            .contains(&publication.oid)
            || catalog
                .schema_publications(**ancestor)
                .contains(&publication.oid)
    });
    match listed {
        Some((index, ancestor)) if publication.via_root => Some((*ancestor, index + 1)),
        Some(_) => Some((relation.oid, 0)),
        None => own.contains(&publication.oid).then_some((relation.oid, 0)),
    }
}

/// Chooses the row filters. A publication without a filter for an operation overrides the filters
/// of the others.
fn choose_filters(decision: &mut Publishing, chosen: &[&Publication], catalog: &mut impl Catalog) {
    let by_schema = catalog.schema_publications(decision.publish_as);
    let mut filters: [Option<Vec<String>>; 3] = [const { Some(Vec::new()) }; 3];
    for publication in chosen {
        let filter = if publication.all_tables || by_schema.contains(&publication.oid) {
            None
        } else {
            catalog.row_filter(publication.oid, decision.publish_as)
        };
        let actions = publication.actions;
        for (slot, publishes) in
            filters
                .iter_mut()
                .zip([actions.insert, actions.update, actions.delete])
        {
            if !publishes {
                continue;
            }
            match (&filter, slot.as_mut()) {
                (Some(text), Some(texts)) => texts.push(text.clone()),
                (None, _) => *slot = None,
                (Some(_), None) => {}
            }
        }
    }
    let [insert, update, delete] = filters.map(|texts| match texts {
        Some(texts) if !texts.is_empty() => Filter::AnyOf(texts),
        _ => Filter::All,
    });
    decision.insert_filter = insert;
    decision.update_filter = update;
    decision.delete_filter = delete;
}

fn choose_columns(
    publish_as: u32,
    chosen: &[&Publication],
    catalog: &mut impl Catalog,
) -> Result<Columns> {
    let lists: Vec<Option<Columns>> = chosen
        .iter()
        .map(|publication| {
            if publication.all_tables {
                return None;
            }
            let mut list = catalog.column_list(publication.oid, publish_as)?;
            list.sort_unstable();
            list.dedup();
            Some(list)
        })
        .collect();

    let mut generated = None;
    for (publication, list) in chosen.iter().zip(&lists) {
        if list.is_some() {
            continue;
        }
        if *generated.get_or_insert(publication.generated) != publication.generated
            && catalog.all_columns(publish_as, GeneratedColumns::None).1
        {
            let (namespace, name) = catalog.name(publish_as);
            return Err(Error::GeneratedColumns { namespace, name });
        }
    }
    let (all, _) = catalog.all_columns(publish_as, generated.unwrap_or_default());

    let mut columns: Option<Columns> = None;
    for list in lists {
        let list = list.unwrap_or_else(|| all.clone());
        match &columns {
            None => columns = Some(list),
            Some(columns) if *columns != list => {
                let (namespace, name) = catalog.name(publish_as);
                return Err(Error::ColumnLists { namespace, name });
            }
            Some(_) => {}
        }
    }
    Ok(columns.unwrap_or(all))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    const ALL: Actions = Actions {
        insert: true,
        update: true,
        delete: true,
        truncate: true,
    };

    #[derive(Default)]
    struct Fake {
        tables: HashMap<u32, Vec<u32>>,
        excluding: HashMap<u32, Vec<u32>>,
        schemas: HashMap<u32, Vec<u32>>,
        ancestors: HashMap<u32, Vec<u32>>,
        namespace: HashMap<u32, &'static str>,
        lists: HashMap<(u32, u32), Vec<i16>>,
        filters: HashMap<(u32, u32), &'static str>,
        generated: bool,
    }

    impl Catalog for Fake {
        fn table_publications(&mut self, relation: u32) -> Vec<u32> {
            self.tables.get(&relation).cloned().unwrap_or_default()
        }
        fn excluding_publications(&mut self, relation: u32) -> Vec<u32> {
            self.excluding.get(&relation).cloned().unwrap_or_default()
        }
        fn schema_publications(&mut self, relation: u32) -> Vec<u32> {
            self.schemas.get(&relation).cloned().unwrap_or_default()
        }
        fn ancestors(&mut self, relation: u32) -> Vec<u32> {
            self.ancestors.get(&relation).cloned().unwrap_or_default()
        }
        fn name(&mut self, relation: u32) -> (String, String) {
            let namespace = self.namespace.get(&relation).unwrap_or(&"public");
            ((*namespace).to_owned(), format!("t{relation}"))
        }
        fn column_list(&mut self, publication: u32, relation: u32) -> Option<Vec<i16>> {
            self.lists.get(&(publication, relation)).cloned()
        }
        fn row_filter(&mut self, publication: u32, relation: u32) -> Option<String> {
            self.filters
                .get(&(publication, relation))
                .map(|text| (*text).to_owned())
        }
        fn all_columns(&mut self, _: u32, generated: GeneratedColumns) -> (Vec<i16>, bool) {
            let mut columns = vec![1, 2, 3];
            if self.generated && generated == GeneratedColumns::Stored {
                columns.push(4);
            }
            (columns, self.generated)
        }
    }

    fn publication(oid: u32) -> Publication {
        Publication {
            oid,
            actions: ALL,
            ..Publication::default()
        }
    }

    fn table(oid: u32) -> RelationFacts {
        RelationFacts {
            oid,
            ..RelationFacts::default()
        }
    }

    fn partition(oid: u32) -> RelationFacts {
        RelationFacts {
            oid,
            is_partition: true,
            is_partitioned: false,
        }
    }

    /// Table 1 is in publications 10 and 11. Table 30 is a partition of 20, which is a partition of
    /// 2. Table 2 is in 12, table 20 in 13.
    fn fake() -> Fake {
        Fake {
            tables: [(1, vec![10, 11]), (2, vec![12]), (20, vec![13])].into(),
            ancestors: [(30, vec![20, 2]), (20, vec![2])].into(),
            ..Fake::default()
        }
    }

    fn any_of(texts: &[&str]) -> Filter {
        Filter::AnyOf(texts.iter().map(|text| (*text).to_owned()).collect())
    }

    #[test]
    fn membership_decides() {
        let mut fake = fake();
        fake.schemas.insert(5, vec![14]);
        let actions = |relation, oid, fake: &mut Fake| {
            publishing(&table(relation), &[publication(oid)], fake)
                .unwrap()
                .actions
        };
        assert_eq!(actions(1, 10, &mut fake), ALL);
        assert_eq!(actions(1, 12, &mut fake), Actions::default());
        assert_eq!(actions(5, 14, &mut fake), ALL);
        assert_eq!(actions(6, 14, &mut fake), Actions::default());
    }

    #[test]
    fn tables_are_excepted_with_their_partitions() {
        let mut fake = fake();
        fake.excluding = [(1, vec![9]), (2, vec![9])].into();
        for via_root in [false, true] {
            let mut actions = |facts, oid| {
                let all = Publication {
                    all_tables: true,
                    via_root,
                    ..publication(oid)
                };
                publishing(&facts, &[all], &mut fake).unwrap().actions
            };
            assert_eq!(actions(table(1), 9), Actions::default());
            assert_eq!(actions(table(1), 8), ALL);
            assert_eq!(actions(table(3), 9), ALL);
            assert_eq!(actions(partition(30), 9), Actions::default());
            assert_eq!(actions(partition(30), 8), ALL);
        }
        // Another publication may include the table.
        let all = Publication {
            all_tables: true,
            ..publication(9)
        };
        let both = publishing(&table(1), &[all, publication(10)], &mut fake).unwrap();
        assert_eq!(both.actions, ALL);
    }

    #[test]
    fn own_schema_is_never_published() {
        let mut fake = fake();
        fake.namespace.insert(7, "braid");
        let all = Publication {
            all_tables: true,
            ..publication(9)
        };
        let decision = publishing(&table(7), std::slice::from_ref(&all), &mut fake).unwrap();
        assert_eq!(decision.actions, Actions::default());
        assert_eq!(
            publishing(&table(8), &[all], &mut fake).unwrap().actions,
            ALL
        );
        fake.namespace.insert(2, "braid");
        let via = Publication {
            all_tables: true,
            via_root: true,
            ..publication(9)
        };
        let decision = publishing(&partition(30), &[via], &mut fake).unwrap();
        assert_eq!(decision.actions, Actions::default());
    }

    #[test]
    fn actions_add_up() {
        let insert = Actions {
            insert: true,
            ..Actions::default()
        };
        let delete = Actions {
            delete: true,
            ..Actions::default()
        };
        let publications = [
            Publication {
                actions: insert,
                ..publication(10)
            },
            Publication {
                actions: delete,
                ..publication(11)
            },
        ];
        let decision = publishing(&table(1), &publications, &mut fake()).unwrap();
        assert_eq!(
            decision.actions,
            Actions {
                insert: true,
                delete: true,
                ..Actions::default()
            }
        );
    }

    #[test]
    fn partitions_and_roots() {
        let via = |oid| Publication {
            via_root: true,
            ..publication(oid)
        };
        let publish_as = |publications: &[Publication]| {
            publishing(&partition(30), publications, &mut fake())
                .unwrap()
                .publish_as
        };
        assert_eq!(publish_as(&[publication(12)]), 30);
        assert_eq!(publish_as(&[via(13)]), 20);
        assert_eq!(publish_as(&[via(13), via(12)]), 2);
        assert_eq!(publish_as(&[via(12), via(13)]), 2);
        assert_eq!(publish_as(&[via(12), publication(13)]), 2);
        assert_eq!(
            publish_as(&[Publication {
                all_tables: true,
                ..via(9)
            }]),
            2
        );
        assert_eq!(
            publish_as(&[Publication {
                all_tables: true,
                ..publication(9)
            }]),
            30
        );
        let root = RelationFacts {
            oid: 2,
            is_partition: false,
            is_partitioned: true,
        };
        let truncated = |publications: &[Publication]| {
            publishing(&root, publications, &mut fake())
                .unwrap()
                .actions
                .truncate
        };
        assert!(!truncated(&[publication(12)]));
        assert!(truncated(&[via(12)]));
    }

    #[test]
    fn only_the_topmost_ancestors_filters_count() {
        let mut fake = fake();
        fake.filters = [((13, 20), "a"), ((12, 2), "b")].into();
        let via = |oid| Publication {
            via_root: true,
            ..publication(oid)
        };
        let decision = publishing(&partition(30), &[via(13), via(12)], &mut fake).unwrap();
        assert_eq!(decision.update_filter, any_of(&["b"]));
    }

    #[test]
    fn filters_add_up_and_none_lifts_them() {
        let mut fake = fake();
        fake.filters = [((10, 1), "a"), ((11, 1), "b")].into();
        let both = [publication(10), publication(11)];
        let decision = publishing(&table(1), &both, &mut fake).unwrap();
        assert_eq!(decision.insert_filter, any_of(&["a", "b"]));
        fake.filters.remove(&(11, 1));
        let decision = publishing(&table(1), &both, &mut fake).unwrap();
        assert_eq!(decision.insert_filter, Filter::All);
        // A publication without inserts does not affect them.
        let no_insert = Actions {
            insert: false,
            ..ALL
        };
        let publications = [
            publication(10),
            Publication {
                actions: no_insert,
                ..publication(11)
            },
        ];
        let decision = publishing(&table(1), &publications, &mut fake).unwrap();
        assert_eq!(decision.insert_filter, any_of(&["a"]));
        assert_eq!(decision.delete_filter, Filter::All);
        fake.filters.insert((11, 1), "b");
        fake.schemas.insert(1, vec![10]);
        let decision = publishing(&table(1), &both, &mut fake).unwrap();
        assert_eq!(decision.insert_filter, Filter::All);
    }

    #[test]
    fn column_lists_must_agree() {
        let mut fake = fake();
        let both = [publication(10), publication(11)];
        fake.lists.insert((10, 1), vec![2, 1]);
        assert!(matches!(
            publishing(&table(1), &both, &mut fake),
            Err(Error::ColumnLists { name, .. }) if name == "t1"
        ));
        fake.lists.insert((11, 1), vec![1, 2]);
        assert_eq!(
            publishing(&table(1), &both, &mut fake).unwrap().columns,
            [1, 2]
        );
        // A list of all columns is no list.
        fake.lists.insert((10, 1), vec![1, 2, 3]);
        fake.lists.remove(&(11, 1));
        assert_eq!(
            publishing(&table(1), &both, &mut fake).unwrap().columns,
            [1, 2, 3]
        );
    }

    #[test]
    fn generated_columns_must_agree() {
        let mut fake = fake();
        fake.generated = true;
        let stored = Publication {
            generated: GeneratedColumns::Stored,
            ..publication(10)
        };
        let both = [stored.clone(), publication(11)];
        assert!(matches!(
            publishing(&table(1), &both, &mut fake),
            Err(Error::GeneratedColumns { .. })
        ));
        assert_eq!(
            publishing(&table(1), &[stored], &mut fake).unwrap().columns,
            [1, 2, 3, 4]
        );
        fake.generated = false;
        assert_eq!(
            publishing(&table(1), &both, &mut fake).unwrap().columns,
            [1, 2, 3]
        );
    }
}
