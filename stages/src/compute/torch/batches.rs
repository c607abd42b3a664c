//! Micro-batches as a request has them: counts in its line, numbers after it.

use model::batch::{Batch, TargetScope};
use serde::Serialize;

/// How many numbers there are of a micro-batch. They follow each other little-endian, rank by rank: `input_ids`
/// (u32, one for each token), `document_lengths` (u32) and `rows` (u64, one for each document), the places of the
/// tokens that predict a target and the ids that they predict (u32 each, one for each target), the weights of these
/// (f32) where there are any, and whether they belong to a response (u8) where some may not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct MicroBatch {
    tokens: usize,
    documents: usize,
    targets: usize,
    weighted: bool,
    responses: bool,
}

/// The micro-batches of each rank with the targets of a scope, and their numbers.
pub(crate) fn encode<'a>(
    ranks: impl IntoIterator<Item = &'a [Batch]>,
    scope: TargetScope,
) -> (Vec<Vec<MicroBatch>>, Vec<u8>) {
    let mut payload = Vec::new();
    let mut of_rank = |batches: &[Batch]| batches.iter().map(|batch| push(batch, scope, &mut payload)).collect();
    let counts = ranks.into_iter().map(&mut of_rank).collect();
    (counts, payload)
}

fn push(batch: &Batch, scope: TargetScope, payload: &mut Vec<u8>) -> MicroBatch {
    let targets = batch.targets_in(scope);
    let mut words = |words: &mut dyn Iterator<Item = u32>| words.for_each(|word| payload.extend(word.to_le_bytes()));
    words(&mut batch.input_ids.iter().copied());
    words(&mut batch.document_lengths.iter().map(|length| *length as u32));
    // A document of no row is one of its own, as in `Batch::push`.
    let row = |document: usize| batch.rows.get(document).copied().unwrap_or(document as u64);
    payload.extend((0..batch.document_lengths.len()).flat_map(|document| row(document).to_le_bytes()));
    let mut words = |words: &mut dyn Iterator<Item = u32>| words.for_each(|word| payload.extend(word.to_le_bytes()));
    words(&mut targets.rows.iter().copied());
    words(&mut targets.ids.iter().copied());
    words(&mut targets.weights.iter().map(|weight| weight.to_bits()));
    let responses = scope == TargetScope::Document;
    if responses {
        payload.extend(targets.response.iter().map(|response| u8::from(*response)));
    }
    MicroBatch {
        tokens: batch.tokens(),
        documents: batch.document_lengths.len(),
        targets: targets.len(),
        weighted: targets.weights().is_some(),
        responses,
    }
}

#[cfg(test)]
mod tests {
    use model::batch::IGNORE_INDEX;

    use super::*;

    #[test]
    fn a_micro_batch_is_its_ids_documents_and_targets() {
        let mut batch = Batch::default();
        batch.push_row(7, &[1, 2, 3, 4], &[IGNORE_INDEX, 2, 3, 4], &[3, 1]);
        let (counts, payload) = encode([&[][..], &[batch.clone()]], TargetScope::Response);
        assert_eq!(counts[1], [MicroBatch { tokens: 4, documents: 2, targets: 2, weighted: false, responses: false }]);
        let words: Vec<u32> = payload.chunks(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect();
        assert_eq!(words, [1, 2, 3, 4, 3, 1, 7, 0, 7, 0, 0, 1, 2, 3]);
        batch.weights = vec![1.0, 0.5, 2.0, 1.0];
        let (counts, payload) = encode([&[batch.clone()][..]], TargetScope::Response);
        assert!(counts[0][0].weighted);
        assert_eq!(payload[payload.len() - 8..], [0.5_f32.to_le_bytes(), 2.0_f32.to_le_bytes()].concat());
        batch.labels[1] = IGNORE_INDEX;
        let (_, payload) = encode([&[batch][..]], TargetScope::Document);
        assert_eq!(payload[payload.len() - 2..], [0, 1]);
    }
}
