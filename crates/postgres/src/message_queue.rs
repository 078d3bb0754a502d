//! Messages between two processes of this server: two queues in a segment of shared memory. Run by
//! processes that ask a worker, and by the worker.
//!
//! Not for: the contents of a message.

use pgrx::pg_sys;

use crate::memory;
use crate::worker::Handle;

/// Bytes of each queue. Longer messages go through in parts.
const QUEUE_BYTES: usize = 64 * 1024;

/// One process's end of both queues. When it is dropped, the other end learns that it is gone.
#[derive(Debug)]
pub struct Channel {
    segment: *mut pg_sys::dsm_segment,
    outgoing: *mut pg_sys::shm_mq_handle,
    incoming: *mut pg_sys::shm_mq_handle,
    number: u32,
}

impl Channel {
    /// Makes the queues.
    #[must_use]
    pub fn create() -> Option<Self> {
        Self::open(None)
    }

    /// The other end of the queues with this number; `None` if they are gone.
    ///
    /// # Safety
    /// Another process's [`Channel::number`] gave the number.
    #[must_use]
    pub unsafe fn attach(number: u32) -> Option<Self> {
        Self::open(Some(number))
    }

    fn open(known: Option<u32>) -> Option<Self> {
        // SAFETY: the segment is mapped until it is detached, and has room for both queues, each of
        // which has one sender and one receiver. An unknown number gives null. The handles outlive
        // transactions, as TopMemoryContext does.
        unsafe {
            let segment = match known {
                Some(number) => pg_sys::dsm_attach(number),
                None => pg_sys::dsm_create(2 * QUEUE_BYTES, 0),
            };
            if segment.is_null() {
                return None;
            }
            pg_sys::dsm_pin_mapping(segment);
            let base = pg_sys::dsm_segment_address(segment).cast::<u8>();
            let first = base.cast::<pg_sys::shm_mq>();
            let second = base.add(QUEUE_BYTES).cast::<pg_sys::shm_mq>();
            let (outgoing, incoming) = if known.is_some() {
                (second, first)
            } else {
                pg_sys::shm_mq_create(first.cast(), QUEUE_BYTES);
                pg_sys::shm_mq_create(second.cast(), QUEUE_BYTES);
                (first, second)
            };
            pg_sys::shm_mq_set_sender(outgoing, pg_sys::MyProc);
            pg_sys::shm_mq_set_receiver(incoming, pg_sys::MyProc);
            let none = std::ptr::null_mut();
            let attach = |queue| memory::in_process(|| pg_sys::shm_mq_attach(queue, segment, none));
            Some(Self {
                segment,
                outgoing: attach(outgoing),
                incoming: attach(incoming),
                number: pg_sys::dsm_segment_handle(segment),
            })
        }
    }

    /// Number by which another process attaches.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Has waiting end when the worker does that is to have the other end.
    pub fn end_with(&self, worker: &Handle) {
        // SAFETY: both queues are attached, and the handle lives as long as the process.
        unsafe {
            pg_sys::shm_mq_set_handle(self.outgoing, worker.raw());
            pg_sys::shm_mq_set_handle(self.incoming, worker.raw());
        }
    }

    /// Sends a message; `None` if the other end is gone.
    #[must_use]
    pub fn send(&self, message: &[u8]) -> Option<()> {
        let bytes = message.as_ptr().cast();
        // SAFETY: the queue is attached, and the bytes stay while they are copied.
        let sent = unsafe { pg_sys::shm_mq_send(self.outgoing, message.len(), bytes, false, true) };
        (sent == pg_sys::shm_mq_result::SHM_MQ_SUCCESS).then_some(())
    }

    /// Waits for a message; `None` if the other end is gone.
    #[must_use]
    pub fn receive(&self) -> Option<Vec<u8>> {
        let (mut len, mut data) = (0, std::ptr::null_mut());
        // SAFETY: the queue is attached; it gives `len` bytes that stay until the next call.
        unsafe {
            let received =
                pg_sys::shm_mq_receive(self.incoming, &raw mut len, &raw mut data, false);
            (received == pg_sys::shm_mq_result::SHM_MQ_SUCCESS)
                .then(|| std::slice::from_raw_parts(data.cast::<u8>(), len).to_vec())
        }
    }
}

impl Drop for Channel {
    /// Also after an error: this raises none, and the other end is to learn of it.
    fn drop(&mut self) {
        // SAFETY: queues and segment are this process's own and let go once.
        unsafe {
            pg_sys::shm_mq_detach(self.outgoing);
            pg_sys::shm_mq_detach(self.incoming);
            pg_sys::dsm_detach(self.segment);
        }
    }
}
