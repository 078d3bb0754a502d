//! The output: a file or standard output.
//!
//! A crash can leave half a line in a file, and a lost connection half a transaction. Both are cut
//! off before more is written, as the server sends them again. Confirmed data is never cut:
//! `format` marks places where nothing is open, a cut goes back at most to the last such mark, and
//! `tail` confirms a position only if everything written is before a mark.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::PathBuf;

use crate::format::Lines;

/// Bytes that are buffered before they are written.
const BUFFER: usize = 256 * 1024;

enum Target {
    Stdout(BufWriter<io::Stdout>),
    File {
        path: PathBuf,
        file: BufWriter<File>,
        /// A regular file, which can be cut.
        regular: bool,
    },
}

/// The output.
pub struct Output {
    target: Target,
    /// Length of the file in bytes.
    len: u64,
    /// Length up to the last mark, which a cut leaves.
    whole: u64,
}

impl Output {
    /// Opens the file, or uses standard output.
    pub fn open(path: Option<&str>) -> io::Result<Self> {
        let Some(path) = path else {
            let target = Target::Stdout(BufWriter::with_capacity(BUFFER, io::stdout()));
            return Ok(Self {
                target,
                len: 0,
                whole: 0,
            });
        };
        let path = PathBuf::from(path);
        let mut file = OpenOptions::new()
            .read(true)
            .append(true)
            .create(true)
            .open(&path)?;
        let regular = file.metadata()?.is_file();
        let mut len = 0;
        if regular {
            len = last_line_end(&mut file)?;
            file.set_len(len)?;
        }
        Ok(Self {
            target: Target::File {
                path,
                file: BufWriter::with_capacity(BUFFER, file),
                regular,
            },
            len,
            whole: len,
        })
    }

    /// Returns whether a cut would keep everything that was written.
    pub fn is_whole(&self) -> bool {
        self.whole == self.len
    }

    /// Makes everything written durable: on disk, or accepted by the reader of standard output.
    pub fn flush(&mut self) -> io::Result<()> {
        match &mut self.target {
            Target::Stdout(out) => out.flush(),
            Target::File { file, regular, .. } => {
                file.flush()?;
                if *regular {
                    file.get_ref().sync_data()?;
                }
                Ok(())
            }
        }
    }

    /// Cuts off everything after the last mark, if the output can be cut.
    pub fn cut(&mut self) -> io::Result<()> {
        match &mut self.target {
            Target::File {
                file,
                regular: true,
                ..
            } => {
                file.flush()?;
                let found = file.get_ref().metadata()?.len();
                if found == self.len {
                    file.get_ref().set_len(self.whole)?;
                } else {
                    // Another process has truncated the file or written to it, so the counted
                    // lengths do not apply to it.
                    self.whole = found;
                }
            }
            Target::File { file, .. } => file.flush()?,
            Target::Stdout(out) => out.flush()?,
        }
        self.len = self.whole;
        Ok(())
    }

    /// Opens the file again under its name, as it may have been renamed. Call it only if nothing is
    /// open, so that no transaction is split between two files.
    pub fn reopen(&mut self) -> io::Result<()> {
        self.flush()?;
        if let Target::File { path, .. } = &self.target {
            let path = path.to_string_lossy().into_owned();
            *self = Self::open(Some(&path))?;
        }
        Ok(())
    }
}

impl Lines for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.len += u64::try_from(bytes.len()).unwrap_or_default();
        match &mut self.target {
            Target::Stdout(out) => out.write_all(bytes),
            Target::File { file, .. } => file.write_all(bytes),
        }
    }

    fn mark_whole(&mut self) {
        self.whole = self.len;
    }
}

/// Returns the length of the file without an incomplete last line.
fn last_line_end(file: &mut File) -> io::Result<u64> {
    let mut end = file.seek(SeekFrom::End(0))?;
    let mut block = [0; 8192];
    while end > 0 {
        let size = end.min(8192);
        let start = end - size;
        file.seek(SeekFrom::Start(start))?;
        let block = block
            .get_mut(..usize::try_from(size).unwrap_or_default())
            .unwrap_or_default();
        file.read_exact(block)?;
        if let Some(at) = block.iter().rposition(|byte| *byte == b'\n') {
            return Ok(start + u64::try_from(at).unwrap_or_default() + 1);
        }
        end = start;
    }
    Ok(0)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "test code")]
mod tests {
    use super::*;

    fn path(name: &str) -> String {
        let path = std::env::temp_dir().join(format!("gir-tail-{}-{name}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        path.to_string_lossy().into_owned()
    }

    #[test]
    fn half_a_line_and_half_a_transaction_are_cut() {
        let path = path("cut");
        std::fs::write(&path, b"old\nhalf").unwrap();
        let mut out = Output::open(Some(&path)).unwrap();
        out.write(b"begin\n").unwrap();
        out.write(b"commit\n").unwrap();
        out.mark_whole();
        assert!(out.is_whole());
        out.write(b"begin\n").unwrap();
        assert!(!out.is_whole());
        out.flush().unwrap();
        assert_eq!(
            std::fs::read(&path).unwrap(),
            b"old\nbegin\ncommit\nbegin\n"
        );
        out.cut().unwrap();
        out.write(b"again\n").unwrap();
        out.flush().unwrap();
        assert_eq!(
            std::fs::read(&path).unwrap(),
            b"old\nbegin\ncommit\nagain\n"
        );
        std::fs::rename(&path, format!("{path}.1")).unwrap();
        out.reopen().unwrap();
        out.write(b"new\n").unwrap();
        out.flush().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"new\n");
        std::fs::remove_file(&path).unwrap();
        std::fs::remove_file(format!("{path}.1")).unwrap();
    }

    #[test]
    fn a_file_that_another_has_cut_is_not_cut() {
        let path = path("other");
        let mut out = Output::open(Some(&path)).unwrap();
        out.write(b"whole\n").unwrap();
        out.mark_whole();
        out.flush().unwrap();
        File::create(&path).unwrap();
        out.write(b"begin\n").unwrap();
        out.cut().unwrap();
        assert!(out.is_whole());
        assert_eq!(std::fs::read(&path).unwrap(), b"begin\n");
        out.write(b"again\n").unwrap();
        out.cut().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"begin\n");
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_file_of_one_long_half_line_is_emptied() {
        let path = path("long");
        std::fs::write(&path, vec![b'x'; 20_000]).unwrap();
        let mut out = Output::open(Some(&path)).unwrap();
        out.write(b"a\n").unwrap();
        out.flush().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"a\n");
        std::fs::remove_file(&path).unwrap();
    }
}
