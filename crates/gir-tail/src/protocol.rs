//! Messages within a replication stream (docs/PROTOCOL.md, section 1).

use std::time::{SystemTime, UNIX_EPOCH};

/// Seconds from 1970-01-01 to 2000-01-01.
const EPOCH_DIFFERENCE: u64 = 946_684_800;

/// A message from the server.
#[derive(Debug, PartialEq, Eq)]
pub enum Message<'a> {
    /// A message of the plugin.
    Data {
        /// Position that the server assigns to it.
        lsn: u64,
        /// The plugin's message.
        body: &'a [u8],
    },
    /// Everything that was committed before this position was sent.
    Keepalive {
        /// The position.
        lsn: u64,
        /// Whether a reply is requested at once.
        reply: bool,
    },
}

/// Parses a message. `None` if it is not valid.
pub fn read(bytes: &[u8]) -> Option<Message<'_>> {
    let (tag, rest) = bytes.split_first()?;
    match tag {
        b'w' => {
            let (header, body) = rest.split_at_checked(24)?;
            let (lsn, _) = header.split_first_chunk::<8>()?;
            let lsn = u64::from_be_bytes(*lsn);
            Some(Message::Data { lsn, body })
        }
        b'k' => {
            let (lsn, rest) = rest.split_first_chunk::<8>()?;
            let [_, _, _, _, _, _, _, _, reply] = rest else {
                return None;
            };
            Some(Message::Keepalive {
                lsn: u64::from_be_bytes(*lsn),
                reply: *reply == 1,
            })
        }
        _ => None,
    }
}

/// Returns the status message: everything before `written` was written, everything before `flushed`
/// is durable.
pub fn status(written: u64, flushed: u64) -> [u8; 34] {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let micros = now
        .as_micros()
        .saturating_sub(u128::from(EPOCH_DIFFERENCE) * 1_000_000);
    let mut message = [0; 34];
    let fields = [
        written,
        flushed,
        flushed,
        u64::try_from(micros).unwrap_or_default(),
    ];
    if let Some(tag) = message.first_mut() {
        *tag = b'r';
    }
    let places = message.iter_mut().skip(1);
    for (place, byte) in places.zip(fields.iter().flat_map(|field| field.to_be_bytes())) {
        *place = byte;
    }
    message
}

#[cfg(test)]
#[allow(clippy::indexing_slicing, reason = "test code")]
mod tests {
    use super::*;

    #[test]
    fn messages() {
        let mut data = vec![b'w'];
        data.extend([7_u64, 8, 9].iter().flat_map(|n| n.to_be_bytes()));
        assert_eq!(read(&data), Some(Message::Data { lsn: 7, body: b"" }));
        data.extend(b"xy");
        assert_eq!(
            read(&data),
            Some(Message::Data {
                lsn: 7,
                body: b"xy"
            })
        );
        let mut keepalive = vec![b'k'];
        keepalive.extend([7_u64, 8].iter().flat_map(|n| n.to_be_bytes()));
        assert_eq!(read(&keepalive), None);
        keepalive.push(1);
        let expected = Message::Keepalive {
            lsn: 7,
            reply: true,
        };
        assert_eq!(read(&keepalive), Some(expected));
        for bad in [&b""[..], b"w1234567", b"x", b"k"] {
            assert_eq!(read(bad), None);
        }
    }

    #[test]
    fn the_status_has_its_fields_in_order() {
        let message = status(1, 2);
        assert_eq!(message[0], b'r');
        let field =
            |at: usize| u64::from_be_bytes(message[at..at + 8].try_into().unwrap_or_default());
        assert_eq!((field(1), field(9), field(17)), (1, 2, 2));
        assert!(field(25) > 800_000_000_000_000);
        assert_eq!(message[33], 0);
    }
}
