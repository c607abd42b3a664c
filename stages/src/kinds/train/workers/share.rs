//! Which rows of a step a worker computes: a fixed rule that every worker follows by itself.

/// Deals out the rows of a step by their tokens, the longest first, each to the worker that has the fewest tokens so
/// far: all wait for the slowest. Within a worker's share rows keep their order. One worker has them all.
pub(in crate::kinds::train) fn shares(tokens: &[usize], workers: usize) -> Vec<Vec<usize>> {
    let mut longest_first: Vec<usize> = (0..tokens.len()).collect();
    longest_first.sort_by_key(|row| (std::cmp::Reverse(tokens[*row]), *row));
    let mut shares = vec![(0, Vec::new()); workers];
    for row in longest_first {
        // Rows without a token cost something too.
        let least = shares.iter_mut().min_by_key(|(load, rows)| (*load, rows.len())).expect("there is a worker");
        least.0 += tokens[row];
        least.1.push(row);
    }
    let in_order = |(_, mut rows): (usize, Vec<usize>)| {
        rows.sort_unstable();
        rows
    };
    shares.into_iter().map(in_order).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_worker_has_all_rows_in_their_order() {
        assert_eq!(shares(&[3, 9, 0, 4], 1), [[0, 1, 2, 3]]);
    }

    #[test]
    fn every_row_has_one_worker_and_tokens_are_even() {
        assert_eq!(shares(&[10, 1, 1, 8, 1, 1], 2), [vec![0, 4], vec![1, 2, 3, 5]]);
        let tokens: Vec<usize> = (0..50).map(|row| 100 + row * 37 % 91).collect();
        for workers in 1..7 {
            let shares = shares(&tokens, workers);
            let mut all: Vec<usize> = shares.concat();
            all.sort_unstable();
            assert_eq!(all, (0..50).collect::<Vec<_>>());
            let loads = shares.iter().map(|rows| rows.iter().map(|row| tokens[*row]).sum::<usize>());
            let (least, most) = (loads.clone().min(), loads.max());
            assert!(most.zip(least).is_some_and(|(most, least)| most - least <= 191), "{workers}: {least:?} {most:?}");
        }
    }

    #[test]
    fn packs_go_around_and_few_rows_leave_workers_without() {
        assert_eq!(shares(&[64; 5], 2), [vec![0, 2, 4], vec![1, 3]]);
        assert_eq!(shares(&[5, 7], 4), [vec![1], vec![0], vec![], vec![]]);
        assert_eq!(shares(&[0; 3], 2), [vec![0, 2], vec![1]]);
    }
}
