//! Opening a text file: decompressed, behind its byte order mark, and a line or value at a time without trusting its
//! length.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use std::rc::Rc;

use flate2::bufread::MultiGzDecoder;

use super::super::form::{Compression, SourceFile};
use super::ReadError;

/// More than this is never held as one line or value: what is longer is no row but a file of another form.
pub(super) const LONGEST: u64 = 256 << 20;

const BUFFER: usize = 1 << 16;

/// How files begin that are compressed; neither is UTF-8.
const COMPRESSED: [(&[u8], &str, &str); 2] = [(b"\x1F\x8B", "gzip", "gz"), (b"\x28\xB5\x2F\xFD", "zstd", "zst")];

/// Opens a file without waiting for what is none.
pub(super) fn regular(path: &Path) -> Result<File, ReadError> {
    cache::regular::open(path).map_err(|error| match error.kind() {
        io::ErrorKind::InvalidInput => ReadError::Malformed(format!("{error}, where a regular file is needed")),
        _ => error.into(),
    })
}

/// Opens a file behind its byte order mark.
pub(super) fn open(file: &SourceFile) -> Result<Box<dyn BufRead>, ReadError> {
    let stored = BufReader::with_capacity(BUFFER, regular(&file.path)?);
    let mut reader: Box<dyn BufRead> = match file.form.compression {
        Compression::None => Box::new(stored),
        Compression::Gzip => decompressed("gzip", MultiGzDecoder::new(stored)),
        Compression::Zstd => decompressed("zstd", zstd::stream::read::Decoder::with_buffer(stored)?),
    };
    if let Some(most) = file.at_most {
        reader = Box::new(BufReader::with_capacity(BUFFER, Cut { inner: reader, left: most }));
    }
    let start = reader.fill_buf()?;
    if start.starts_with(b"\xEF\xBB\xBF") {
        reader.consume(3);
    } else if start.starts_with(b"\xFF\xFE") || start.starts_with(b"\xFE\xFF") {
        return Err(ReadError::Utf16);
    } else if file.form.compression == Compression::None
        && let Some(&(_, kind, extension)) = COMPRESSED.iter().find(|(magic, ..)| start.starts_with(magic))
    {
        return Err(ReadError::Compressed { kind, extension });
    }
    Ok(reader)
}

fn decompressed(kind: &'static str, inner: impl Read + 'static) -> Box<dyn BufRead> {
    Box::new(BufReader::with_capacity(BUFFER, Decompressed { inner, kind }))
}

/// Ends in an error after so many bytes: an end of the file would make a row of half a one.
struct Cut<R> {
    inner: R,
    left: u64,
}

impl<R: Read> Read for Cut<R> {
    fn read(&mut self, target: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.left).unwrap_or(usize::MAX).min(target.len());
        if most == 0 && !target.is_empty() {
            // The file may end just here.
            let mut next = [0];
            return match self.inner.read(&mut next)? {
                0 => Ok(0),
                _ => Err(io::Error::other("no more of the file is read ahead")),
            };
        }
        let read = self.inner.read(&mut target[..most])?;
        self.left -= read as u64;
        Ok(read)
    }
}

/// Says of damaged data that it is the compression that is damaged.
struct Decompressed<R> {
    inner: R,
    kind: &'static str,
}

impl<R: Read> Read for Decompressed<R> {
    fn read(&mut self, target: &mut [u8]) -> io::Result<usize> {
        self.inner.read(target).map_err(|error| {
            let of_the_disk = error.raw_os_error().is_some();
            if of_the_disk || error.kind() == io::ErrorKind::Interrupted {
                return error;
            }
            let message = match error.kind() {
                io::ErrorKind::UnexpectedEof => format!("the {} data is cut off", self.kind),
                _ => format!("the {} data is damaged: {error}", self.kind),
            };
            io::Error::new(io::ErrorKind::InvalidData, message)
        })
    }
}

/// What a call of [`next_line`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Line {
    /// A line, without its end (LF or CRLF).
    Whole,
    /// A line that is too long and was passed over.
    TooLong,
    /// The end of the file.
    End,
}

/// Puts the next line into `line`, if it has no more than `longest` bytes.
pub(super) fn next_line(reader: &mut impl BufRead, line: &mut Vec<u8>, longest: u64) -> io::Result<Line> {
    line.clear();
    if reader.by_ref().take(longest + 1).read_until(b'\n', line)? == 0 {
        return Ok(Line::End);
    }
    if line.last() != Some(&b'\n') && line.len() as u64 > longest {
        *line = Vec::new();
        reader.skip_until(b'\n')?;
        return Ok(Line::TooLong);
    }
    if line.last() == Some(&b'\n') {
        line.pop();
        if line.last() == Some(&b'\r') {
            line.pop();
        }
    }
    Ok(Line::Whole)
}

/// Fails where more than [`LONGEST`] bytes are read between two calls of [`Meter::restart`].
pub(super) struct Metered<R> {
    inner: R,
    left: Rc<Cell<u64>>,
}

/// The other end of a [`Metered`] reader.
#[derive(Clone)]
pub(super) struct Meter(Rc<Cell<u64>>);

impl Meter {
    /// Begins to count anew.
    pub(super) fn restart(&self) {
        self.0.set(LONGEST);
    }

    /// Counts nothing until the next restart.
    pub(super) fn suspend(&self) {
        self.0.set(u64::MAX);
    }
}

impl<R> Metered<R> {
    pub(super) fn new(inner: R) -> (Self, Meter) {
        let left = Rc::new(Cell::new(LONGEST));
        (Self { inner, left: Rc::clone(&left) }, Meter(left))
    }
}

impl<R: Read> Read for Metered<R> {
    fn read(&mut self, target: &mut [u8]) -> io::Result<usize> {
        let amount = self.inner.read(target)?;
        match self.left.get() {
            u64::MAX => {}
            left if amount as u64 > left => {
                let message = format!("one value is longer than {} MiB", LONGEST >> 20);
                return Err(io::Error::new(io::ErrorKind::InvalidData, message));
            }
            left => self.left.set(left - amount as u64),
        }
        Ok(amount)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_meter_runs_between_restarts() {
        let (mut reader, meter) = Metered::new(io::repeat(b'x'));
        let mut chunk = vec![0; 1 << 20];
        for _ in 0..(LONGEST >> 20) {
            reader.read_exact(&mut chunk).unwrap();
        }
        assert!(reader.read(&mut chunk).is_err());
        meter.restart();
        reader.read_exact(&mut chunk).unwrap();
        meter.suspend();
        for _ in 0..=(LONGEST >> 20) {
            reader.read_exact(&mut chunk).unwrap();
        }
    }

    #[test]
    fn lines_end_in_either_way_or_at_the_end_of_the_file() {
        let mut reader: &[u8] = b"a\r\n\nb\rc\nd";
        let mut line = Vec::new();
        let mut lines = Vec::new();
        while next_line(&mut reader, &mut line, 9).unwrap() == Line::Whole {
            lines.push(String::from_utf8(line.clone()).unwrap());
        }
        assert_eq!(lines, ["a", "", "b\rc", "d"]);
    }

    #[test]
    fn a_line_that_is_too_long_is_passed_over() {
        let mut reader: &[u8] = b"12345678\nshort\n123456789";
        let mut line = Vec::new();
        assert_eq!(next_line(&mut reader, &mut line, 7).unwrap(), Line::TooLong);
        assert_eq!((next_line(&mut reader, &mut line, 7).unwrap(), line.as_slice()), (Line::Whole, &b"short"[..]));
        assert_eq!(next_line(&mut reader, &mut line, 7).unwrap(), Line::TooLong);
        assert_eq!(next_line(&mut reader, &mut line, 7).unwrap(), Line::End);
    }
}
