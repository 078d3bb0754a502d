//! The relations that a stream has announced, by the numbers that its changes use for them. Run by
//! the leader.

/// A relation at the provider.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// OID at the provider.
    pub oid: u32,
    /// Schema.
    pub namespace: String,
    /// Name.
    pub name: String,
}

/// Whether the stream's header has arrived, and its relations.
#[derive(Debug, Default)]
pub struct Dictionary {
    is_open: bool,
    entries: Vec<Entry>,
}

impl Dictionary {
    /// Records that the header has arrived. Returns false if it had arrived before.
    pub fn open(&mut self) -> bool {
        !std::mem::replace(&mut self.is_open, true)
    }

    /// Returns whether the header has arrived. Nothing else may precede it.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.is_open
    }

    /// Adds a relation under this number. Returns false, and keeps nothing, if the number is not
    /// the next one, or if the header has not arrived.
    pub fn learn(&mut self, number: u32, entry: Entry) -> bool {
        let is_next = self.is_open && number as usize == self.entries.len();
        if is_next {
            self.entries.push(entry);
        }
        is_next
    }

    /// Returns the relation with this number.
    #[must_use]
    pub fn get(&self, number: u32) -> Option<&Entry> {
        self.entries.get(number as usize)
    }

    /// Returns the names that a relation had earlier in this stream.
    #[must_use]
    pub fn former_names(&self, of: &Entry) -> Vec<(String, String)> {
        self.entries
            .iter()
            .filter(|entry| {
                entry.oid == of.oid && (&entry.namespace, &entry.name) != (&of.namespace, &of.name)
            })
            .map(|entry| (entry.namespace.clone(), entry.name.clone()))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(oid: u32, name: &str) -> Entry {
        Entry {
            oid,
            namespace: "public".to_owned(),
            name: name.to_owned(),
        }
    }

    #[test]
    fn nothing_comes_before_the_header_and_the_header_once() {
        let mut dictionary = Dictionary::default();
        assert!(!dictionary.learn(0, entry(1, "a")));
        assert!(dictionary.get(0).is_none());
        assert!(dictionary.open());
        assert!(dictionary.is_open());
        assert!(!dictionary.open());
    }

    #[test]
    fn numbers_come_in_order() {
        let mut dictionary = Dictionary::default();
        dictionary.open();
        assert!(!dictionary.learn(1, entry(1, "a")));
        assert!(dictionary.learn(0, entry(1, "a")));
        assert!(!dictionary.learn(0, entry(2, "b")));
        assert_eq!(dictionary.get(0), Some(&entry(1, "a")));
        assert!(dictionary.get(1).is_none());
    }

    #[test]
    fn former_names_are_those_of_the_same_relation() {
        let mut dictionary = Dictionary::default();
        dictionary.open();
        for (number, (oid, name)) in [(1, "old"), (2, "other"), (1, "new"), (1, "new")]
            .into_iter()
            .enumerate()
        {
            assert!(dictionary.learn(u32::try_from(number).unwrap(), entry(oid, name)));
        }
        let newest = dictionary.get(3).unwrap().clone();
        assert_eq!(
            dictionary.former_names(&newest),
            [("public".to_owned(), "old".to_owned())]
        );
    }
}
