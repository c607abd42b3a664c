//! «Did you mean …?»: the nearest of the names that would have been right.

/// The candidate nearest to `name`, if one is near enough to be a slip of the keyboard or of memory.
///
/// Edits count first (Damerau–Levenshtein, over lower-case letters, `-` and `_` being one): one for every three letters
/// of the longer name may differ, and one at least. Where no candidate is that near, a name is taken that begins the same,
/// is a part of the other or has all its words (`lr_scheduler` for `scheduler`, `max_len` for `max_seq_len`).
pub fn nearest<'a, S>(name: &str, candidates: impl IntoIterator<Item = &'a S>) -> Option<&'a str>
where
    S: AsRef<str> + ?Sized + 'a,
{
    let wanted = normal(name);
    let mut best: Option<(Distance, &'a str)> = None;
    for candidate in candidates {
        let candidate = candidate.as_ref();
        let Some(distance) = distance(&wanted, &normal(candidate)) else { continue };
        if best.as_ref().is_none_or(|(least, _)| distance.is_less_than(least)) {
            best = Some((distance, candidate));
        }
    }
    best.map(|(_, candidate)| candidate)
}

/// A help line: the nearest candidate, else all of them where they are few enough to read.
pub fn help<'a, S>(name: &str, what: &str, candidates: impl IntoIterator<Item = &'a S> + Clone) -> Option<String>
where
    S: AsRef<str> + ?Sized + 'a,
{
    if let Some(nearest) = nearest(name, candidates.clone()) {
        return Some(format!("did you mean `{nearest}`?"));
    }
    let names: Vec<String> = candidates.into_iter().map(|candidate| format!("`{}`", candidate.as_ref())).collect();
    match names.len() {
        0 => None,
        1..=40 => Some(format!("{what}: {}", names.join(", "))),
        many => Some(format!("{what}: {} and {} more", names[..40].join(", "), many - 40)),
    }
}

/// How far a candidate is from the name.
enum Distance {
    Edits(usize),
    /// One is a part of the other, or they begin the same; the value is one minus Jaro–Winkler similarity.
    Related(f64),
}

impl Distance {
    fn is_less_than(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Edits(a), Self::Edits(b)) => a < b,
            (Self::Edits(_), Self::Related(_)) => true,
            (Self::Related(_), Self::Edits(_)) => false,
            (Self::Related(a), Self::Related(b)) => a < b,
        }
    }
}

fn distance(wanted: &str, candidate: &str) -> Option<Distance> {
    let longer = wanted.chars().count().max(candidate.chars().count());
    let edits = strsim::damerau_levenshtein(wanted, candidate);
    // Of very short names one letter is most of the name: `gpu` is not a slip for `cpu`.
    let begins_the_same = longer > 3 || wanted.chars().next() == candidate.chars().next();
    if edits <= (longer / 3).max(1) && edits < longer && begins_the_same {
        return Some(Distance::Edits(edits));
    }
    let similarity = strsim::jaro_winkler(wanted, candidate);
    let shorter = wanted.len().min(candidate.len());
    let contained = shorter >= 4 && (wanted.contains(candidate) || candidate.contains(wanted));
    let related = contained
        || initials(wanted, candidate)
        || words_within(wanted, candidate)
        || (similarity >= 0.9 && begins_the_same);
    related.then_some(Distance::Related(1.0 - similarity))
}

/// Whether a name is the initials of another's words (`lr` for `learning_rate`).
fn initials(wanted: &str, candidate: &str) -> bool {
    candidate.contains('_') && candidate.split('_').filter_map(|word| word.chars().next()).eq(wanted.chars())
}

/// Whether every word of a name of several words is one of the candidate's (`max_len` for `max_seq_len`).
fn words_within(wanted: &str, candidate: &str) -> bool {
    wanted.contains('_') && wanted.split('_').all(|word| candidate.split('_').any(|other| other == word))
}

fn normal(name: &str) -> String {
    name.to_lowercase().replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_finds_its_name() {
        let names = ["max_seq_len", "on_too_long", "dataset", "tokenizer", "scheduler"];
        assert_eq!(nearest("max_seq_length", &names), Some("max_seq_len"));
        assert_eq!(nearest("datasets", &names), Some("dataset"));
        assert_eq!(nearest("tokeniser", &names), Some("tokenizer"));
        assert_eq!(nearest("max-seq-len", &names), Some("max_seq_len"));
        assert_eq!(nearest("lr_scheduler", &names), Some("scheduler"));
        assert_eq!(nearest("Dataset", &names), Some("dataset"));
        assert_eq!(nearest("max_len", &names), Some("max_seq_len"));
        assert_eq!(nearest("otl", &names), Some("on_too_long"));
        assert_eq!(nearest("lr", &["rank", "learning_rate", "lora"]), Some("learning_rate"));
    }

    #[test]
    fn a_different_word_finds_nothing() {
        let names = ["rank", "alpha", "dropout"];
        assert_eq!(nearest("epochs", &names), None);
        assert_eq!(nearest("lr", &names), None);
        assert_eq!(nearest("x", &["y"]), None);
        assert_eq!(nearest("gpu", &["cpu", "npu"]), None);
        assert_eq!(nearest("x", &[] as &[&str]), None);
    }

    #[test]
    fn fewer_edits_win_and_the_first_of_equals() {
        assert_eq!(nearest("tokens", &["token", "tokens2", "tokens"]), Some("tokens"));
        assert_eq!(nearest("pack", &["pack1", "packs"]), Some("pack1"));
    }

    #[test]
    fn help_lists_the_names_where_none_is_near() {
        assert_eq!(help("packss", "stages", &["packs", "base"]).as_deref(), Some("did you mean `packs`?"));
        assert_eq!(help("qqq", "stages", &["packs", "base"]).as_deref(), Some("stages: `packs`, `base`"));
        assert_eq!(help("qqq", "stages", &[] as &[&str]), None);
    }
}
