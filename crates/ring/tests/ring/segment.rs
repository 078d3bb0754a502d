//! Laying out a segment, attaching to one, and attaching to memory that is none.

use braid_ring::{ApplierState, Complete, Error, Geometry, MAX_APPLIERS};

use crate::memory::{Memory, Random, buffer_at, frames, ring, small, store};

#[test]
fn what_is_asked_for_is_rounded_to_what_works() {
    for (appliers, buffer, descriptors) in [
        (0, 0, 0),
        (1, 1, 1),
        (999, 70_001, 17),
        (4, u64::MAX, u64::MAX),
        (usize::MAX, 65_536, 4096),
    ] {
        let geometry = Geometry::new(appliers, buffer, descriptors);
        assert!((1..=MAX_APPLIERS).contains(&geometry.appliers));
        assert!(geometry.buffer >= 65_536 && geometry.buffer.is_multiple_of(4096));
        assert!(geometry.descriptors >= 16 && geometry.descriptors.is_power_of_two());
        assert_eq!(
            geometry,
            Geometry::new(geometry.appliers, geometry.buffer, geometry.descriptors)
        );
        assert!(geometry.bytes() > usize::try_from(geometry.buffer).unwrap());
    }
}

#[test]
fn a_segment_that_is_too_small_is_refused() {
    let geometry = small();
    let memory = Memory::new(geometry.bytes() - 1);
    assert_eq!(memory.create(geometry).unwrap_err(), Error::NotARing);
}

#[test]
fn attaching_sees_what_was_laid_out() {
    let (memory, leader) = ring(Geometry::new(3, 100_000, 100));
    let other = memory.attach().unwrap();
    assert_eq!(other.geometry(), leader.ring().geometry());
    assert_eq!(other.leader(), (1000, 1));
    assert_eq!(
        (
            other.published(),
            other.claimed(),
            other.committed(),
            other.tail()
        ),
        (0, 0, 0, 0)
    );
    assert!(other.slot(2).is_some() && other.slot(3).is_none());
    other.set_state(2, ApplierState::WaitingForTurn);
    assert_eq!(
        leader.ring().slot(2).unwrap().state(),
        ApplierState::WaitingForTurn
    );
    assert_eq!(
        (other.slot(1).unwrap().pid(), other.slot(1).unwrap().latch()),
        (2, 3)
    );
    assert!(!other.stop_requested());
    leader.ring().request_stop();
    assert!(other.stop_requested());
}

#[test]
fn i10_memory_that_is_no_ring_is_refused() {
    let (memory, _leader) = ring(small());
    // Too small for a header, too small for what the header says, misaligned.
    assert_eq!(memory.attach_at(0, 0).unwrap_err(), Error::NotARing);
    assert_eq!(memory.attach_at(0, 64).unwrap_err(), Error::NotARing);
    assert_eq!(
        memory.attach_at(0, memory.len() - 64).unwrap_err(),
        Error::NotARing
    );
    for offset in [1, 8, 32] {
        assert_eq!(
            memory.attach_at(offset, memory.len() - 64).unwrap_err(),
            Error::NotARing
        );
    }
    let mut random = Random::new("i10_memory_that_is_no_ring_is_refused");
    for _ in 0..100 {
        let garbage = Memory::new(memory.len());
        garbage.scribble(0, &random.bytes(garbage.len()));
        assert_eq!(garbage.attach().unwrap_err(), Error::NotARing);
    }
    assert_eq!(
        Memory::new(memory.len()).attach().unwrap_err(),
        Error::NotARing
    );
}

#[test]
fn i10_a_header_with_an_impossible_shape_is_refused() {
    // Magic, appliers, bytes of the buffer, descriptors: the first four words.
    let shapes: [[u64; 3]; 8] = [
        [0, 65_536, 16],
        [65, 65_536, 16],
        [2, 65_537, 16],
        [2, 0, 16],
        [2, u64::MAX, 16],
        [2, 65_536, 17],
        [2, 65_536, 0],
        [2, 65_536, 1 << 20],
    ];
    for shape in shapes {
        let (memory, _leader) = ring(small());
        for (word, value) in shape.iter().enumerate() {
            memory.scribble(8 + word * 8, &value.to_le_bytes());
        }
        assert_eq!(memory.attach().unwrap_err(), Error::NotARing, "{shape:?}");
    }
}

fn header(len: u32, kind: u32) -> [u8; 8] {
    let [a, b, c, d] = len.to_le_bytes();
    let [e, f, g, h] = kind.to_le_bytes();
    [a, b, c, d, e, f, g, h]
}

#[test]
fn i10_frame_headers_that_make_no_sense_are_corruption() {
    // (bytes written over the first frame's header, which has 16 bytes)
    let headers = [
        header(16, 0),        // no kind
        header(16, 5),        // unknown kind
        header(16, u32::MAX), // unknown kind
        header(u32::MAX, 1),  // longer than the buffer
        header(65_536, 1),    // longer than what is left of it
        header(41, 1),        // longer than the transaction
        header(16, 3),        // a part without an end: the next frame is whole
        header(16, 4),        // a last part without a first
        header(0, 2),         // a wrap that leads past the end
    ];
    for bytes in headers {
        let (memory, mut leader) = ring(small());
        assert!(store(&mut leader, &[7; 16]) && store(&mut leader, &[8; 8]));
        leader.publish(&Complete::default());
        memory.scribble(buffer_at(small()), &bytes);
        let mut transaction = leader.ring().claim(0).unwrap();
        let read = frames(&mut transaction);
        assert!(
            matches!(read, Err(Error::Corrupt(_))),
            "{bytes:?} gave {read:?}"
        );
    }
}

#[test]
fn i10_an_unfinished_frame_at_the_end_is_corruption() {
    let (_memory, mut leader) = ring(small());
    assert!(leader.store(b"the first part of something", true, false));
    leader.publish(&Complete::default());
    assert!(matches!(
        frames(&mut leader.ring().claim(0).unwrap()),
        Err(Error::Corrupt(_))
    ));
}

#[test]
fn i10_any_bytes_in_the_buffer_are_an_error_or_frames() {
    let mut random = Random::new("i10_any_bytes_in_the_buffer_are_an_error_or_frames");
    for round in 0..2000 {
        let (memory, mut leader) = ring(small());
        let mut sizes = Vec::new();
        for _ in 0..=random.index(20) {
            let len = random.index(300);
            assert!(store(&mut leader, &random.bytes(len)));
            sizes.push(len);
        }
        leader.publish(&Complete::default());
        for _ in 0..=random.index(4) {
            let at = buffer_at(small()) + random.index(1000);
            // Small numbers are likelier to look like headers.
            let bytes = if round % 2 == 0 {
                random.bytes(8)
            } else {
                header(
                    u32::try_from(random.index(400)).unwrap(),
                    u32::try_from(random.index(6)).unwrap(),
                )
                .to_vec()
            };
            memory.scribble(at, &bytes);
        }
        if let Ok(frames) = frames(&mut leader.ring().claim(0).unwrap()) {
            // The bytes that were read lie within the transaction.
            let read: usize = frames.iter().map(Vec::len).sum();
            assert!(read <= 20 * 308, "{read}");
        }
    }
}
