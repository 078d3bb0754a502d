//! The shared memory of one subscription's group: a leader and its appliers.
//!
//! One segment holds the ring, and behind it the directory of the schema log: the descriptions of
//! the source and of relations from the stream. The leader appends to it, never changes it, and
//! each applier reads it at its own pace. The log grows by further segments, each larger than the
//! one before, so that it needs no guess of how many relations there will be.
//!
//! The segments live as long as a process of the group has them mapped.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use braid_bgworker::sqlstate::SqlState;
use braid_ring::{Geometry, Ring};
use pgrx::pg_sys;

use braid_bgworker::running::Running;
use braid_postgres::error::PgError;
use braid_postgres::plain;

const LOG_SEGMENTS: usize = 24;
const FIRST_LOG_SEGMENT: usize = 64 * 1024;
/// Transactions in flight between leader and appliers.
const DESCRIPTORS: u64 = 8192;

#[repr(C, align(64))]
struct Directory {
    handles: [AtomicU32; LOG_SEGMENTS],
    used: [AtomicU64; LOG_SEGMENTS],
    running: Running,
}

/// A mapped segment.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mapping {
    pub(crate) base: NonNull<u8>,
    len: usize,
}

/// The segment with this handle.
fn attached(handle: u32) -> Result<Mapping, PgError> {
    // A handle that is not known gives null.
    Ok(map(plain::dsm_attach(handle))?.0)
}

/// Keeps a segment mapped. Returns it and its handle.
fn map(segment: *mut pg_sys::dsm_segment) -> Result<(Mapping, u32), PgError> {
    if segment.is_null() {
        return Err(PgError::new(
            SqlState::ObjectNotInPrerequisiteState,
            "shared memory of the subscription's leader is gone",
        ));
    }
    // SAFETY: the segment is mapped; pinned, so that it stays mapped until this process ends.
    let (base, len, handle) = unsafe {
        pg_sys::dsm_pin_mapping(segment);
        (
            pg_sys::dsm_segment_address(segment),
            pg_sys::dsm_segment_map_length(segment),
            pg_sys::dsm_segment_handle(segment),
        )
    };
    let base = NonNull::new(base.cast::<u8>()).ok_or_else(|| {
        PgError::new(
            SqlState::InternalError,
            "shared memory segment has no address",
        )
    })?;
    Ok((Mapping { base, len }, handle))
}

/// Creates a segment, mapped until this process ends. Returns it and its handle.
///
/// # Errors
/// 53200 and the like from PostgreSQL.
pub(crate) fn create(bytes: usize) -> Result<(Mapping, u32), PgError> {
    map(plain::dsm_create(bytes, 0))
}

/// Maps the segment with this handle, of which at least `bytes` are needed, until this process
/// ends.
///
/// # Errors
/// 55000 if it is gone or too small.
pub(crate) fn attach(handle: u32, bytes: usize) -> Result<Mapping, PgError> {
    let mapping = attached(handle)?;
    if mapping.len < bytes {
        return Err(PgError::new(
            SqlState::ObjectNotInPrerequisiteState,
            "shared memory segment is too small",
        ));
    }
    Ok(mapping)
}

/// One process's view of the group's memory.
#[derive(Debug)]
pub struct Group {
    /// The ring.
    pub ring: Ring,
    directory: NonNull<Directory>,
    /// Log segments that this process has mapped, in order.
    segments: Vec<Mapping>,
}

impl Group {
    /// Lay out the memory of a new group. Returns it and the handle by which appliers attach.
    ///
    /// # Errors
    /// 53200 and the like from PostgreSQL; XX000 when the layout does not fit.
    pub fn create(appliers: usize, buffer: u64) -> Result<(Self, u32), PgError> {
        let geometry = Geometry::new(appliers, buffer, DESCRIPTORS);
        let ring_bytes = geometry.bytes().next_multiple_of(64);
        let (mapping, handle) = create(ring_bytes + size_of::<Directory>())?;
        // SAFETY: fresh memory of the size that was asked for, page-aligned, mapped until this
        // process ends; all-zero is a valid directory.
        let group = unsafe {
            let ring = Ring::create(mapping.base, ring_bytes, geometry)
                .map_err(|error| PgError::new(SqlState::InternalError, error.to_string()))?;
            let directory = mapping.base.add(ring_bytes).cast::<Directory>();
            directory.as_ptr().write_bytes(0, 1);
            Self {
                ring,
                directory,
                segments: Vec::new(),
            }
        };
        Ok((group, handle))
    }

    /// Map the memory of a group that exists.
    ///
    /// # Errors
    /// 55000 when it is gone.
    pub fn attach(handle: u32) -> Result<Self, PgError> {
        let mapping = attached(handle)?;
        // SAFETY: laid out by `create` before the handle was given away; the ring checks its own
        // header.
        unsafe {
            let ring = Ring::attach(mapping.base, mapping.len)
                .map_err(|error| PgError::new(SqlState::InternalError, error.to_string()))?;
            let ring_bytes = ring.geometry().bytes().next_multiple_of(64);
            if mapping.len < ring_bytes + size_of::<Directory>() {
                return Err(PgError::new(
                    SqlState::InternalError,
                    "shared memory segment is too small",
                ));
            }
            let directory = mapping.base.add(ring_bytes).cast::<Directory>();
            Ok(Self {
                ring,
                directory,
                segments: Vec::new(),
            })
        }
    }

    /// Another view of it in this process.
    #[must_use]
    pub fn view(&self) -> Self {
        Self {
            ring: self.ring,
            directory: self.directory,
            segments: self.segments.clone(),
        }
    }

    /// Takes over the segments that the view of `other` has mapped since: a segment is mapped once
    /// in a process.
    pub fn follow(&mut self, other: &Self) {
        let known = self.segments.len();
        self.segments
            .extend(other.segments.iter().skip(known).copied());
    }

    /// The transaction that is applied while it runs.
    pub fn running(&self) -> &'static Running {
        &self.directory().running
    }

    fn directory(&self) -> &'static Directory {
        // SAFETY: mapped until this process ends; atomics only.
        unsafe { self.directory.as_ref() }
    }

    /// Append an entry to the log. Only the leader does.
    ///
    /// # Errors
    /// 54000 when the log is full, 53200 when there is no memory.
    pub fn append(&mut self, entry: &[u8]) -> Result<(), PgError> {
        let total = (8 + entry.len()).next_multiple_of(8);
        let fits = match self.segments.len().checked_sub(1) {
            Some(last) => {
                let used = self.used(last);
                self.segments
                    .get(last)
                    .is_some_and(|segment| used + total <= segment.len)
            }
            None => false,
        };
        if !fits {
            let index = self.segments.len();
            let size = (FIRST_LOG_SEGMENT << index.min(16)).max(total + 64);
            let Some(place) = self.directory().handles.get(index) else {
                return Err(PgError::new(
                    SqlState::ProgramLimitExceeded,
                    "too many relations in the provider's stream",
                ));
            };
            let (mapping, handle) = create(size)?;
            place.store(handle, Ordering::Release);
            self.segments.push(mapping);
        }
        let last = self.segments.len().saturating_sub(1);
        let used = self.used(last);
        if let (Some(segment), Some(counter)) =
            (self.segments.get(last), self.directory().used.get(last))
        {
            let length = u64::try_from(entry.len()).unwrap_or(0).to_le_bytes();
            // SAFETY: `total` bytes from `used` lie within the segment; readers look only below the
            // counter.
            unsafe {
                let at = segment.base.as_ptr().add(used);
                at.copy_from_nonoverlapping(length.as_ptr(), 8);
                at.add(8)
                    .copy_from_nonoverlapping(entry.as_ptr(), entry.len());
            }
            counter.store((used + total) as u64, Ordering::Release);
        }
        Ok(())
    }

    fn used(&self, segment: usize) -> usize {
        let used = self
            .directory()
            .used
            .get(segment)
            .map_or(0, |used| used.load(Ordering::Acquire));
        usize::try_from(used).unwrap_or(0)
    }

    /// Reads the part of the log that was appended since `place`.
    ///
    /// # Errors
    /// Those of `each`; 55000 if a segment is gone.
    pub fn read_log(
        &mut self,
        place: &mut LogPlace,
        mut each: impl FnMut(&[u8]) -> Result<(), PgError>,
    ) -> Result<(), PgError> {
        loop {
            let Some(handle) = self.directory().handles.get(place.segment) else {
                return Ok(());
            };
            let handle = handle.load(Ordering::Acquire);
            if handle == 0 {
                return Ok(());
            }
            if self.segments.len() <= place.segment {
                // The leader published the handle and keeps the segment mapped.
                self.segments.push(attached(handle)?);
            }
            let used = self.used(place.segment);
            let Some(segment) = self.segments.get(place.segment).copied() else {
                return Ok(());
            };
            while place.offset < used {
                // SAFETY: entries below `used` are complete and do not change; the length is
                // checked against it.
                let entry = unsafe {
                    let at = segment.base.as_ptr().add(place.offset);
                    let len = u64::from_le_bytes(at.cast::<[u8; 8]>().read());
                    let len = usize::try_from(len).unwrap_or(usize::MAX);
                    if len > used - place.offset - 8 {
                        return Err(PgError::new(
                            SqlState::InternalError,
                            "schema log is corrupt",
                        ));
                    }
                    place.offset += (8 + len).next_multiple_of(8);
                    std::slice::from_raw_parts(at.add(8), len)
                };
                each(entry)?;
            }
            let next = self.directory().handles.get(place.segment + 1);
            if next.is_none_or(|next| next.load(Ordering::Acquire) == 0) {
                return Ok(());
            }
            // The leader opens a segment only when the one before is full; look once more at what
            // came meanwhile.
            if self.used(place.segment) == place.offset {
                *place = LogPlace {
                    segment: place.segment + 1,
                    offset: 0,
                };
            }
        }
    }
}

/// How far a process has read the log.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LogPlace {
    segment: usize,
    offset: usize,
}
