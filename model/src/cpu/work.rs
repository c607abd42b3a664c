//! What attention computes and moves, for who records where the time goes.

use profile::Work;

use crate::batch::Documents;
use crate::ops::AttentionShape;

/// Products per pair of a query and a key that it sees, forward: `q · k` and `p · v`.
pub(super) const FORWARD: usize = 2;

/// As [`FORWARD`], backward: the scores again, the gradients of the weights, and those of q, k and v.
pub(super) const BACKWARD: usize = 5;

/// Attention with so many products per pair of a query and a key that it sees. Exponentials are not counted, nor are
/// the tiles on the border that are computed and not seen.
pub(super) fn of_attention(products: usize, documents: &Documents, shape: &AttentionShape) -> Work {
    let seen = |start: usize, length: usize| -> usize {
        let window = shape.window.unwrap_or(usize::MAX);
        // Positions up to the window see all before them, the others as many as the window has.
        let (first, last) = (start + 1, start + length);
        let growing = last.min(window).saturating_sub(start);
        (first + first + growing.saturating_sub(1)) * growing / 2 + (length - growing) * window.min(last)
    };
    let mut pairs = 0;
    let (mut rows, mut keys) = (0, 0);
    for span in documents.spans() {
        pairs += seen(span.start, span.rows.len());
        rows += span.rows.len();
        keys += span.start + span.rows.len();
    }
    let width = shape.num_attention_heads * shape.head_dim;
    let key_width = shape.num_key_value_heads * shape.head_dim;
    Work::values(products * (rows * width + keys * key_width)).computing(2 * products * pairs * width)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attention_counts_each_pair_that_is_seen() {
        for window in [None, Some(1), Some(3), Some(100)] {
            let shape = AttentionShape {
                num_attention_heads: 1,
                num_key_value_heads: 1,
                head_dim: 1,
                scale: 1.0,
                window,
                soft_cap: None,
            };
            for (start, length) in [(0, 1), (0, 7), (2, 5), (9, 4)] {
                let positions = start..start + length;
                let pairs: usize = positions.map(|position| (position + 1).min(window.unwrap_or(usize::MAX))).sum();
                let documents = Documents::continued([(0, start, length)]);
                let work = of_attention(FORWARD, &documents, &shape);
                assert_eq!(work.flops, 4 * pairs as u64, "{start} {length} {window:?}");
            }
        }
    }
}
