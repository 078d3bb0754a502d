//! Settings under which values have the same text whatever the session: set when a stream starts, put back when it ends.

use std::ffi::{CStr, CString};

use pgrx::pg_sys;

/// Everything that output functions look at. A timestamp has its offset in the ISO form, so any TimeZone would do, but the same
/// row should be the same bytes.
const SETTINGS: [(&CStr, &CStr); 7] = [
    (c"datestyle", c"ISO"),
    (c"intervalstyle", c"postgres"),
    (c"extra_float_digits", c"3"),
    (c"timezone", c"GMT"),
    (c"bytea_output", c"hex"),
    (c"lc_monetary", c"C"),
    (c"search_path", c"pg_catalog"),
];

/// What has to be undone.
#[derive(Debug)]
pub(super) enum Session {
    /// In a transaction (an SQL function): settings of a nesting level, which an error undoes as well.
    Level(i32),
    /// Outside of one (a walsender): the values from before. An error leaves ours in place; such a connection is good for
    /// replication commands only.
    Saved(Vec<(&'static CStr, CString)>),
}

impl Session {
    /// Set them.
    pub(super) fn enter() -> Self {
        // SAFETY: names and values are C strings, and the settings are ones that every user may set.
        unsafe {
            if pg_sys::IsTransactionState() {
                let level = pg_sys::NewGUCNestLevel();
                for (name, value) in SETTINGS {
                    set(name, value, pg_sys::GucAction::GUC_ACTION_SAVE);
                }
                return Self::Level(level);
            }
            let mut saved = Vec::with_capacity(SETTINGS.len());
            for (name, value) in SETTINGS {
                let before = pg_sys::GetConfigOption(name.as_ptr(), false, false);
                if !before.is_null() {
                    saved.push((name, CStr::from_ptr(before).to_owned()));
                }
                set(name, value, pg_sys::GucAction::GUC_ACTION_SET);
            }
            Self::Saved(saved)
        }
    }

    /// Undo them.
    pub(super) fn leave(self) {
        // SAFETY: the level is the one of `enter`, and levels opened since are closed: logical decoding nests its transactions.
        unsafe {
            match self {
                Self::Level(level) => pg_sys::AtEOXact_GUC(false, level),
                Self::Saved(saved) => {
                    for (name, value) in saved {
                        set(name, &value, pg_sys::GucAction::GUC_ACTION_SET);
                    }
                }
            }
        }
    }
}

unsafe fn set(name: &CStr, value: &CStr, action: pg_sys::GucAction::Type) {
    // SAFETY: C strings.
    unsafe {
        pg_sys::set_config_option(
            name.as_ptr(),
            value.as_ptr(),
            pg_sys::GucContext::PGC_USERSET,
            pg_sys::GucSource::PGC_S_SESSION,
            action,
            true,
            0,
            false,
        );
    }
}

/// Send functions convert text to the client's encoding (`pq_sendtext`), but a stream is in the server's. While this lives, the
/// client's encoding is the server's.
///
/// It is put back while unwinding too, unlike what other guards do: `SetClientEncoding` then only assigns variables (both
/// encodings were in use before), and a session must not be left with an encoding that its client does not know of.
#[derive(Debug)]
pub(super) struct ServerEncoding {
    client: i32,
}

impl ServerEncoding {
    /// Switch, unless both are the same.
    pub(super) fn enter() -> Option<Self> {
        // SAFETY: reads and assigns variables.
        unsafe {
            let (client, server) = (
                pg_sys::pg_get_client_encoding(),
                pg_sys::GetDatabaseEncoding(),
            );
            if client == server {
                return None;
            }
            pg_sys::SetClientEncoding(server);
            Some(Self { client })
        }
    }
}

impl Drop for ServerEncoding {
    fn drop(&mut self) {
        // SAFETY: see above.
        unsafe { pg_sys::SetClientEncoding(self.client) };
    }
}
