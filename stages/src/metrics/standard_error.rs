//! How far a figure of some rows may be from that of all rows that there could be: its standard error.

/// Values of rows, of which the mean is the figure (Welford).
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Mean {
    rows: u64,
    mean: f64,
    /// Summed squares of the differences from the mean.
    squares: f64,
}

impl Mean {
    pub(crate) fn add(&mut self, value: f64) {
        self.rows += 1;
        let difference = value - self.mean;
        self.mean += difference / self.rows as f64;
        self.squares += difference * (value - self.mean);
    }

    /// The sample's standard deviation by the square root of its size, as lm-eval has it; none for less than two rows.
    pub(crate) fn standard_error(&self) -> Option<f64> {
        let rows = self.rows as f64;
        (self.rows > 1).then(|| (self.squares / (rows - 1.0) / rows).sqrt())
    }
}

/// Sums and counts of rows, of which the figure is all sums by all counts: so many nats, or right tokens, of so many
/// tokens.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Ratio {
    rows: u64,
    sum: f64,
    count: f64,
    sum_squares: f64,
    products: f64,
    count_squares: f64,
}

impl Ratio {
    /// A row without a count says nothing of the ratio: it is none of the rows.
    pub(crate) fn add(&mut self, sum: f64, count: u64) {
        if count == 0 {
            return;
        }
        let count = count as f64;
        self.rows += 1;
        self.sum += sum;
        self.count += count;
        self.sum_squares += sum * sum;
        self.products += sum * count;
        self.count_squares += count * count;
    }

    /// That of the linearised ratio, rows being drawn and not tokens (Cochran, Sampling Techniques, 2.11); none for
    /// less than two rows.
    pub(crate) fn standard_error(&self) -> Option<f64> {
        let (rows, ratio) = (self.rows as f64, self.sum / self.count);
        let residuals = self.sum_squares - 2.0 * ratio * self.products + ratio * ratio * self.count_squares;
        let error = (residuals.max(0.0) * rows / (rows - 1.0)).sqrt() / self.count;
        (self.rows > 1 && error.is_finite()).then_some(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_mean(values: &[f64]) -> Option<f64> {
        let mut mean = Mean::default();
        values.iter().for_each(|value| mean.add(*value));
        mean.standard_error()
    }

    fn of_ratio(rows: &[(f64, u64)]) -> Option<f64> {
        let mut ratio = Ratio::default();
        rows.iter().for_each(|(sum, count)| ratio.add(*sum, *count));
        ratio.standard_error()
    }

    /// `statistics.stdev(values) / math.sqrt(len(values))`.
    #[test]
    fn that_of_a_mean_is_that_of_the_sample() {
        let error = of_mean(&[1.0, 0.0, 0.0, 1.0, 1.0]).unwrap();
        assert!((error - 0.244_948_974_278_317_8).abs() < 1e-15, "{error}");
        assert_eq!(of_mean(&[3.0, 3.0]), Some(0.0));
        assert_eq!((of_mean(&[3.0]), of_mean(&[])), (None, None));
    }

    #[test]
    fn rows_of_one_length_have_the_error_of_their_mean() {
        let values = [0.5, 2.0, 1.25, 3.0];
        let rows = values.map(|value| (value * 7.0, 7));
        let (ratio, mean) = (of_ratio(&rows).unwrap(), of_mean(&values).unwrap());
        assert!((ratio - mean).abs() < 1e-12, "{ratio}, not {mean}");
    }

    /// Against the spread of the figure over many samples, drawn with a generator of its own.
    #[test]
    fn that_of_rows_of_many_lengths_is_the_spread_of_the_figure() {
        let mut state = 7_u64;
        let mut draw = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f64 / (1_u64 << 24) as f64
        };
        let (mut figures, mut errors) = (Mean::default(), 0.0);
        const SAMPLES: u32 = 2000;
        for _ in 0..SAMPLES {
            let mut sample = Ratio::default();
            for _ in 0..50 {
                let count = 1 + (draw() * 30.0) as u64;
                // Long rows are easier, and each row has a difficulty of its own.
                let sum = count as f64 * (2.0 + draw() - count as f64 / 40.0);
                sample.add(sum, count);
            }
            figures.add(sample.sum / sample.count);
            errors += sample.standard_error().unwrap() / f64::from(SAMPLES);
        }
        let spread = (figures.squares / (figures.rows as f64 - 1.0)).sqrt();
        assert!((errors / spread - 1.0).abs() < 0.06, "{errors}, and the figures spread by {spread}");
    }

    #[test]
    fn equal_rows_have_none_and_one_row_has_no_error() {
        assert_eq!(of_ratio(&[(2.0, 3), (0.0, 0)]), None);
        assert_eq!(of_ratio(&[(2.0, 3), (0.0, 0), (1.0, 3)]), of_ratio(&[(2.0, 3), (1.0, 3)]));
        assert!(of_ratio(&[(2.0, 3), (2.0, 3), (4.0, 6)]).unwrap() < 1e-9);
        assert_eq!(of_ratio(&[(2.0, 3)]), None);
        assert_eq!(of_ratio(&[(0.0, 0), (0.0, 0)]), None);
    }
}
