//! The pieces of a SentencePiece model, `tokenizer.model`: a protocol buffer, of which field 1 holds a piece each.

use super::GgufError;

/// What a piece is, by its number in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PieceKind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

/// A piece.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Piece {
    pub(super) text: String,
    pub(super) score: f32,
    pub(super) kind: PieceKind,
}

/// The pieces, in the order of their ids.
pub(super) fn pieces(file: &[u8]) -> Result<Vec<Piece>, GgufError> {
    let damaged = || GgufError::Tokenizer("`tokenizer.model` is no SentencePiece model".to_owned());
    let mut fields = Fields { rest: file };
    let mut pieces = Vec::new();
    while let Some((number, field)) = fields.next().ok_or_else(damaged)? {
        if let (1, Field::Bytes(bytes)) = (number, field) {
            pieces.push(piece(bytes).ok_or_else(damaged)?);
        }
    }
    if pieces.is_empty() { Err(damaged()) } else { Ok(pieces) }
}

fn piece(bytes: &[u8]) -> Option<Piece> {
    let mut piece = Piece { text: String::new(), score: 0.0, kind: PieceKind::Normal };
    let mut fields = Fields { rest: bytes };
    while let Some((number, field)) = fields.next()? {
        match (number, field) {
            (1, Field::Bytes(text)) => piece.text = str::from_utf8(text).ok()?.to_owned(),
            (2, Field::Word(bits)) => piece.score = f32::from_bits(bits),
            (3, Field::Number(kind)) => {
                piece.kind = match kind {
                    1 => PieceKind::Normal,
                    2 => PieceKind::Unknown,
                    3 => PieceKind::Control,
                    4 => PieceKind::UserDefined,
                    5 => PieceKind::Unused,
                    6 => PieceKind::Byte,
                    _ => return None,
                }
            }
            _ => {}
        }
    }
    Some(piece)
}

enum Field<'a> {
    Number(u64),
    Word(u32),
    Bytes(&'a [u8]),
    Skipped,
}

struct Fields<'a> {
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    /// The next field with its number; `Some(None)` at the end, `None` where the bytes are none.
    fn next(&mut self) -> Option<Option<(u64, Field<'a>)>> {
        if self.rest.is_empty() {
            return Some(None);
        }
        let tag = self.number()?;
        let field = match tag & 7 {
            0 => Field::Number(self.number()?),
            1 => {
                self.take(8)?;
                Field::Skipped
            }
            2 => {
                let length = usize::try_from(self.number()?).ok()?;
                Field::Bytes(self.take(length)?)
            }
            5 => Field::Word(u32::from_le_bytes(*self.take(4)?.first_chunk()?)),
            _ => return None,
        };
        Some(Some((tag >> 3, field)))
    }

    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(length)?;
        self.rest = rest;
        Some(taken)
    }

    fn number(&mut self) -> Option<u64> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.take(1)?[0];
            number |= u64::from(byte & 127) << shift;
            if byte < 128 {
                return Some(number);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_read_and_damage_is_found() {
        let piece = [&[10, 3, 226, 150, 129, 21][..], &(-2.5f32).to_le_bytes(), &[24, 6]].concat();
        let file = [&[10, piece.len() as u8][..], &piece, &[18, 2, 8, 1]].concat();
        let expected = Piece { text: "▁".to_owned(), score: -2.5, kind: PieceKind::Byte };
        assert_eq!(pieces(&file).unwrap(), [expected]);
        for cut in 0..piece.len() + 2 {
            assert!(pieces(&file[..cut]).is_err(), "{cut}");
        }
    }
}
