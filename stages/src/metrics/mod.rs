//! Metrics of generated text, each as its reference implementation computes it.

pub mod bleu;
pub mod rouge;
