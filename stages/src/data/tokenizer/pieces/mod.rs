//! Texts that follow each other, as ids.
//!
//! Tokenizers made after SentencePiece put a space before a text, and so before each of several texts that are encoded
//! one by one: their ids would stand for another text than the one rendered. So such texts are encoded as the one text
//! they are, and its ids are cut where the texts meet. Where a token would lie on both sides of such a border, the
//! border stays one: what follows it is encoded as the middle of a text.

use std::borrow::Cow;

use tokenizers::{
    Model, ModelWrapper, NormalizedString, Normalizer, NormalizerWrapper, OffsetType, PreTokenizedString, PreTokenizer,
    PreTokenizerWrapper,
};

use super::{Tokenizer, TokenizerError};
use crate::data::prompt::{ControlTexts, PLAIN_BEGIN, PLAIN_END, is_marked};

/// Texts that a piece is put behind to be encoded as the middle of a text. One will do that shares no token with the
/// piece: few tokens hold a line break and something else, and fewer the other.
const ANCHORS: [&str; 2] = ["\n", "§"];

/// Ids of a text that holds borders.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Cut {
    pub ids: Vec<u32>,
    /// For each border how many ids lie before it; `None` where one lies on both sides.
    pub places: Vec<Option<usize>>,
}

impl Cut {
    /// For ids that stand for these ranges of a text, and borders in it, both in order.
    pub(super) fn new(ids: Vec<u32>, ranges: impl IntoIterator<Item = (usize, usize)>, borders: &[usize]) -> Self {
        let mut places = Vec::with_capacity(borders.len());
        // How far the ids so far go. Ids of one character's bytes all have the range of the character.
        let mut reached = 0;
        for (index, (start, end)) in ranges.into_iter().enumerate() {
            while let Some(border) = borders.get(places.len()).filter(|border| start >= **border) {
                places.push((reached <= *border).then_some(index));
            }
            reached = reached.max(end);
        }
        while let Some(border) = borders.get(places.len()) {
            places.push((reached <= *border).then_some(ids.len()));
        }
        Self { ids, places }
    }
}

/// Whether tokens that were added to the vocabulary are recognised in a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AddedTokens {
    Recognised,
    Ignored,
}

/// Where a text stands among others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Position {
    First,
    Inside,
}

/// What stands in a text with marks.
enum Part<'a> {
    Text(&'a str),
    /// A control token that is to be plain text.
    Control(&'a str),
}

impl Tokenizer {
    /// The ids of a text in which some control tokens stand between marks ([`ControlTexts::mark`]): those are plain
    /// text, all others are recognised. The same ids as transformers' under `sanitize_control_tokens`.
    ///
    /// # Errors
    /// As for [`Tokenizer::encode`].
    ///
    /// [`ControlTexts::mark`]: crate::data::prompt::ControlTexts::mark
    pub fn encode_marked(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        Ok(self.encode_joined(&[text])?.concat())
    }

    /// The ids of texts that follow each other, for each text its own. They may hold marks, as for
    /// [`Tokenizer::encode_marked`].
    ///
    /// All ids together are those of all the texts together, where no token lies in two texts; else they are ids that
    /// spell the texts. With a tokenizer that encodes a text alike wherever it stands, they are those of each text
    /// apart.
    ///
    /// # Errors
    /// As for [`Tokenizer::encode`].
    pub fn encode_texts(&self, texts: &[&str]) -> Result<Vec<Vec<u32>>, TokenizerError> {
        if !self.encodes_apart {
            return self.encode_joined(texts);
        }
        let apart = |text: &&str| if is_marked(text) { self.encode_marked(text) } else { self.encode(text) };
        texts.iter().map(apart).collect()
    }

    /// Of texts that follow each other, the texts that are encoded in one go.
    pub(crate) fn encoded_together<'a>(&self, texts: &[&'a str]) -> Vec<Cow<'a, str>> {
        match (self.encodes_apart, texts) {
            (true, _) | (_, [] | [_]) => texts.iter().map(|text| Cow::Borrowed(*text)).collect(),
            (false, _) => vec![texts.concat().into()],
        }
    }

    fn encode_joined(&self, texts: &[&str]) -> Result<Vec<Vec<u32>>, TokenizerError> {
        let mut ids = vec![Vec::new(); texts.len()];
        // Texts without a mark between them, of which the first is in the text of this index.
        let (mut begin, mut run) = (0, Vec::new());
        for (index, text) in texts.iter().enumerate() {
            for (number, part) in parts(text, &self.control_texts).into_iter().enumerate() {
                // A mark is a border.
                if number > 0 {
                    self.add_run(&mut ids, begin, &std::mem::take(&mut run))?;
                }
                match part {
                    Part::Text(text) => {
                        begin = if run.is_empty() { index } else { begin };
                        run.push(text);
                    }
                    Part::Control(control) => {
                        let control = self.encode_control(control, position_behind(&ids))?;
                        ids[index].extend(control);
                    }
                }
            }
        }
        self.add_run(&mut ids, begin, &run)?;
        Ok(ids)
    }

    /// Adds the ids of texts without a mark to those from `begin` on.
    fn add_run(&self, ids: &mut [Vec<u32>], begin: usize, run: &[&str]) -> Result<(), TokenizerError> {
        let mut made = Vec::with_capacity(run.len());
        self.encode_run(run, position_behind(ids), &mut made)?;
        ids[begin..].iter_mut().zip(made).for_each(|(ids, made)| ids.extend(made));
        Ok(())
    }

    /// The ids of texts without a mark, for each text its own.
    fn encode_run(&self, texts: &[&str], position: Position, made: &mut Vec<Vec<u32>>) -> Result<(), TokenizerError> {
        let (text, borders) = match texts {
            [] => return Ok(()),
            [text] => (Cow::Borrowed(*text), Vec::new()),
            [_, ..] => (texts.concat().into(), borders(texts)),
        };
        let Cut { ids, places } = self.cut_at(&text, &borders, position, AddedTokens::Recognised)?;
        if let Some(places) = places.iter().copied().collect::<Option<Vec<usize>>>() {
            let begins = std::iter::once(0).chain(places.iter().copied());
            let ends = places.iter().copied().chain([ids.len()]);
            made.extend(begins.zip(ends).map(|(begin, end)| ids[begin..end].to_vec()));
            return Ok(());
        }
        // Between the borders that stay the texts are looked at anew: fewer each time.
        let stays = (1..texts.len()).filter(|end| places[end - 1].is_none()).chain([texts.len()]);
        let mut begin = 0;
        for end in stays {
            let position = if begin == 0 { position } else { Position::Inside };
            self.encode_run(&texts[begin..end], position, made)?;
            begin = end;
        }
        Ok(())
    }

    /// The ids of a control token's text, none of which is a special token.
    fn encode_control(&self, control: &str, position: Position) -> Result<Vec<u32>, TokenizerError> {
        let encode = |text, position| Ok(self.cut_at(text, &[], position, AddedTokens::Ignored)?.ids);
        let ids = encode(control, position)?;
        if !ids.iter().any(|id| self.is_special(*id)) {
            return Ok(ids);
        }
        // A vocabulary of whole pieces (Unigram) finds the token without being told of it; it does not find its parts.
        let border = control.chars().next().map_or(0, char::len_utf8);
        let (letter, rest) = control.split_at(border);
        let mut ids = encode(letter, position)?;
        ids.extend(encode(rest, Position::Inside)?);
        Ok(ids)
    }

    /// Encodes a text with borders in it. One in the middle of others is encoded behind something else, which is then
    /// taken away, so that no space is put before it that belongs at the beginning of a text.
    fn cut_at(
        &self,
        text: &str,
        borders: &[usize],
        position: Position,
        added: AddedTokens,
    ) -> Result<Cut, TokenizerError> {
        if position == Position::First || text.is_empty() {
            return self.cut(text, borders, added);
        }
        // Where no space is put before a text, it is encoded alone if not behind a line break.
        for anchor in &ANCHORS[..if self.encodes_apart { 1 } else { ANCHORS.len() }] {
            let borders = std::iter::once(&0).chain(borders).map(|border| border + anchor.len());
            let Cut { mut ids, places } = self.cut(&[anchor, text].concat(), &borders.collect::<Vec<_>>(), added)?;
            let Some((Some(first), places)) = places.split_first() else { continue };
            ids.drain(..*first);
            return Ok(Cut { ids, places: places.iter().map(|place| place.map(|place| place - first)).collect() });
        }
        self.cut(text, borders, added)
    }

    fn cut(&self, text: &str, borders: &[usize], added: AddedTokens) -> Result<Cut, TokenizerError> {
        if added == AddedTokens::Recognised {
            if borders.is_empty() {
                return Ok(Cut { ids: self.encode(text)?, places: Vec::new() });
            }
            if let Some(cut) = self.bulk.as_ref().and_then(|bulk| bulk.cut(text, borders)) {
                return Ok(cut);
            }
        }
        self.cut_with_offsets(text, borders, added).map_err(TokenizerError::Coding)
    }

    /// By the steps of `tokenizers::Tokenizer::encode` but for the last: a post-processor may take blanks out of
    /// offsets.
    fn cut_with_offsets(&self, text: &str, borders: &[usize], added: AddedTokens) -> tokenizers::Result<Cut> {
        let mut pieces = match added {
            AddedTokens::Recognised => {
                self.inner.get_added_vocabulary().extract_and_normalize(self.inner.get_normalizer(), text)
            }
            AddedTokens::Ignored => {
                let mut normalized = NormalizedString::from(text);
                if let Some(normalizer) = self.inner.get_normalizer() {
                    normalizer.normalize(&mut normalized)?;
                }
                PreTokenizedString::from(normalized)
            }
        };
        if let Some(pre_tokenizer) = self.inner.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut pieces)?;
        }
        pieces.tokenize(|piece| self.inner.get_model().tokenize(piece.get()))?;
        let encoding = pieces.into_encoding(None, 0, OffsetType::Byte)?;
        Ok(Cut::new(encoding.get_ids().to_vec(), encoding.get_offsets().iter().copied(), borders))
    }
}

/// Whether texts that follow each other may be encoded apart: where a text has the same ids at the beginning of another
/// as in its middle. That is so of vocabularies of bytes: every byte is a token, no token says that a word or a text
/// begins with it, and no space is put before a text.
pub(super) fn encodes_apart(tokenizer: &tokenizers::Tokenizer) -> bool {
    let marks_words = match tokenizer.get_model() {
        ModelWrapper::BPE(bpe) => bpe.continuing_subword_prefix.is_some() || bpe.end_of_word_suffix.is_some(),
        ModelWrapper::WordPiece(_) | ModelWrapper::WordLevel(_) | ModelWrapper::Unigram(_) => true,
    };
    !marks_words
        && tokenizer.get_pre_tokenizer().is_some_and(gives_bytes)
        && !tokenizer.get_pre_tokenizer().is_some_and(puts_space_before)
        && !tokenizer.get_normalizer().is_some_and(prepends)
}

fn gives_bytes(pre_tokenizer: &PreTokenizerWrapper) -> bool {
    match pre_tokenizer {
        PreTokenizerWrapper::ByteLevel(_) => true,
        PreTokenizerWrapper::Sequence(all) => all.as_ref().iter().any(gives_bytes),
        _ => false,
    }
}

fn puts_space_before(pre_tokenizer: &PreTokenizerWrapper) -> bool {
    match pre_tokenizer {
        PreTokenizerWrapper::ByteLevel(bytes) => bytes.add_prefix_space,
        PreTokenizerWrapper::Metaspace(_) => true,
        PreTokenizerWrapper::Sequence(all) => all.as_ref().iter().any(puts_space_before),
        _ => false,
    }
}

fn prepends(normalizer: &NormalizerWrapper) -> bool {
    match normalizer {
        NormalizerWrapper::Prepend(_) => true,
        NormalizerWrapper::Sequence(all) => all.as_ref().iter().any(prepends),
        _ => false,
    }
}

fn position_behind(ids: &[Vec<u32>]) -> Position {
    if ids.iter().all(Vec::is_empty) { Position::First } else { Position::Inside }
}

/// Where texts meet, in all of them together.
fn borders(texts: &[&str]) -> Vec<usize> {
    let ends = texts.iter().scan(0, |end, text| {
        *end += text.len();
        Some(*end)
    });
    ends.take(texts.len() - 1).collect()
}

/// What stands in a text, between marks and without them.
fn parts<'a>(text: &'a str, control_texts: &ControlTexts) -> Vec<Part<'a>> {
    let mut parts = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find([PLAIN_BEGIN, PLAIN_END]) {
        let (before, marked) = rest.split_at(at);
        parts.push(Part::Text(before));
        // A template that cuts texts may leave one mark without the other: then it is only a border, also where another
        // follows that had a partner of its own.
        let after_mark = &marked[PLAIN_BEGIN.len_utf8()..];
        let control = after_mark.split_once(PLAIN_END).filter(|_| marked.starts_with(PLAIN_BEGIN));
        rest = match control {
            Some((control, after)) if control_texts.has(control) => {
                parts.push(Part::Control(control));
                after
            }
            _ => after_mark,
        };
    }
    parts.push(Part::Text(rest));
    parts
}

#[cfg(test)]
mod tests;
