//! Settings under which values have the same text whatever the session: set when a stream starts,
//! put back when it ends.

use std::ffi::{CStr, CString};

use braid_postgres::setting::{self, As, Level};
use braid_postgres::{error, plain, transaction};

/// Beside [`setting::OF_TEXTS`]. A timestamp has its offset in the ISO form, so any TimeZone would
/// do, but the same row should be the same bytes.
const SETTINGS: [(&CStr, &CStr); 2] = [(c"timezone", c"GMT"), (c"search_path", c"pg_catalog")];

fn settings() -> impl Iterator<Item = (&'static CStr, &'static CStr)> {
    setting::OF_TEXTS.into_iter().chain(SETTINGS)
}

/// The settings of a stream, until it ends.
#[derive(Debug)]
pub(super) struct Session(Option<Before>);

/// The settings that have to be restored.
#[derive(Debug)]
enum Before {
    /// In a transaction (an SQL function): a level of settings, which an error undoes as well.
    Level(Level),
    /// Outside of one (a walsender): the values from before. A stream that ends with an error puts
    /// them back when its memory goes: the connection takes SQL, too.
    Saved(Vec<(&'static CStr, CString)>),
}

impl Session {
    /// Set them: every user may.
    pub(super) fn enter() -> Self {
        if transaction::is_open() {
            let level = Level::begin();
            for (name, value) in settings() {
                level.set(name, value, As::User);
            }
            return Self(Some(Before::Level(level)));
        }
        let mut saved = Vec::new();
        for (name, value) in settings() {
            saved.extend(setting::get(name).map(|before| (name, before)));
            setting::set_for_session(name, value, As::User);
        }
        Self(Some(Before::Saved(saved)))
    }

    /// Undo them. Levels that were begun since have ended: logical decoding nests its transactions.
    pub(super) fn leave(mut self) {
        match self.0.take() {
            Some(Before::Level(level)) => level.end(false),
            Some(Before::Saved(saved)) => put_back(saved),
            None => {}
        }
    }
}

impl Drop for Session {
    /// After an error, when the stream's memory goes. While the error unwinds nothing is done, as
    /// in all guards.
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        if let Some(Before::Saved(saved)) = self.0.take()
            && let Err(failure) = error::catch(|| put_back(saved))
        {
            failure.log("could not put the settings of a connection back");
        }
    }
}

fn put_back(saved: Vec<(&'static CStr, CString)>) {
    for (name, value) in saved {
        setting::set_for_session(name, &value, As::User);
    }
}

/// Send functions convert text to the client's encoding (`pq_sendtext`), but a stream is in the
/// server's. While this lives, the client's encoding is the server's.
///
/// It is also restored while unwinding, unlike in other guards: `SetClientEncoding` then only
/// assigns variables (both encodings were in use before), and a session must not be left with an
/// encoding that its client does not know of.
#[derive(Debug)]
pub(super) struct ServerEncoding {
    client: i32,
}

impl ServerEncoding {
    /// Switch, unless both are the same.
    pub(super) fn enter() -> Option<Self> {
        let (client, server) = (
            plain::pg_get_client_encoding(),
            plain::GetDatabaseEncoding(),
        );
        if client == server {
            return None;
        }
        plain::SetClientEncoding(server);
        Some(Self { client })
    }
}

impl Drop for ServerEncoding {
    fn drop(&mut self) {
        plain::SetClientEncoding(self.client);
    }
}
