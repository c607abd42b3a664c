//! Whether the fast encoder is used: where there is much to encode, and it has the same ids over the first rows.

use engine::context::StageContext;

use crate::artifact::{RowsReader, TableError};
use crate::prompt::{Piece, PromptRenderer};
use crate::tokenizer::Tokenizer;

/// From so much text on, what the fast encoder saves is more than what it takes to compare it with the other.
const MUCH_TEXT: u64 = 1 << 20;

/// How much of the first rows the two are compared over, and of one text in letters.
const SAMPLED_BYTES: usize = 128 << 10;
const SAMPLED_LETTERS: usize = 16 << 10;

/// Makes the tokenizer fast, where it pays and can be done. Ids are the same in either case.
pub(super) fn speed_up(
    tokenizer: &mut Tokenizer,
    renderer: &PromptRenderer,
    rows: &mut RowsReader,
    context: &mut StageContext,
) -> Result<(), TableError> {
    let (mut samples, mut read, mut bytes) = (Vec::new(), 0, 0);
    while read < rows.len() && bytes < SAMPLED_BYTES {
        let row = rows.row(read)?;
        read += 1;
        bytes += row.text_bytes();
        // Of a row that cannot be rendered its number has to be told, when its turn comes.
        for segment in renderer.lesson(&row, tokenizer).map_or_else(|_| Vec::new(), |lesson| lesson.segments) {
            if let Piece::Text(text) = segment.piece {
                samples.push(text.chars().take(SAMPLED_LETTERS).collect());
            }
        }
    }
    if bytes as u64 * rows.len() / read.max(1) < MUCH_TEXT {
        return Ok(());
    }
    let encoder = match tokenizer.speed_up(&samples) {
        Ok(()) => "tokenizers 1.0",
        Err(unfit) => {
            context.log(&format!("texts are encoded by tokenizers 0.23, which takes longer: {unfit}"));
            "tokenizers 0.23"
        }
    };
    context.record("encoder", encoder);
    Ok(())
}
