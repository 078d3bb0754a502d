//! The mailbox of a database's versions process: messages of other nodes' versions processes.
//!
//! The process creates a segment of shared memory when it starts, and says where in its manager's
//! entry. Sessions that other members have opened put messages in (`braid.version_receive`).
//! Messages may be lost: a full mailbox takes no more.

use std::cell::Cell;
use std::sync::atomic::Ordering;

use braid_postgres::error::PgError;
use braid_postgres::process;

use crate::group;
use crate::mail::Mail;
use crate::registry::{self, ManagerEntry};

/// Bytes for messages that wait.
const MAIL: usize = 1 << 20;
/// The longest message, in bytes.
pub const MESSAGE_LIMIT: usize = MAIL / 4;

#[repr(C)]
struct Layout {
    mail: Mail<MAIL>,
}

/// One process's view of it.
#[derive(Clone, Copy)]
pub struct Mailbox {
    layout: &'static Layout,
}

impl std::fmt::Debug for Mailbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Mailbox")
    }
}

impl Mailbox {
    /// Creates the mailbox of this process, the versions process.
    ///
    /// # Errors
    /// 53200 and the like from PostgreSQL.
    pub fn create(entry: &ManagerEntry) -> Result<Self, PgError> {
        let (mapping, handle) = group::create(size_of::<Layout>())?;
        // SAFETY: the segment is fresh, page-aligned, large enough, and mapped until this process
        // ends; zeroes are a valid Layout, and nobody else knows the handle yet.
        let layout = unsafe {
            mapping.base.as_ptr().write_bytes(0, size_of::<Layout>());
            mapping.base.cast::<Layout>().as_ref()
        };
        entry.versions_mailbox.store(handle, Ordering::Release);
        Ok(Self { layout })
    }

    fn attach(handle: u32) -> Result<Self, PgError> {
        let mapping = group::attach(handle, size_of::<Layout>())?;
        // SAFETY: the process laid it out before it gave the handle away; mapped until this process
        // ends; atomics only.
        let layout = unsafe { mapping.base.cast::<Layout>().as_ref() };
        Ok(Self { layout })
    }

    /// Takes all messages out. For the versions process.
    #[must_use]
    pub fn take(&self) -> Vec<Vec<u8>> {
        self.layout.mail.take()
    }
}

thread_local! {
    /// The mailbox that this session knows, by its handle.
    static KNOWN: Cell<Option<(u32, Mailbox)>> = const { Cell::new(None) };
}

/// Puts a message of another node in. It is lost if there is no room, or no process.
pub fn deliver(message: &[u8]) {
    let Some(entry) = registry::my_manager() else {
        return;
    };
    let handle = entry.versions_mailbox.load(Ordering::Acquire);
    if handle == 0 || message.len() > MESSAGE_LIMIT {
        return;
    }
    let known = KNOWN.get().filter(|(known, _)| *known == handle);
    let mailbox = known.map_or_else(
        || Mailbox::attach(handle).ok(),
        |(_, mailbox)| Some(mailbox),
    );
    let Some(mailbox) = mailbox else {
        return;
    };
    KNOWN.set(Some((handle, mailbox)));
    mailbox.layout.mail.post(message);
    process::set_latch(entry.versions_latch.load(Ordering::Acquire));
}
