//! «Did you mean …?»: the nearest of the names that would have been right.
//!
//! To find it takes a look at every name, and a file may have tens of thousands of names and as many mistakes. So while
//! one is read (`limited`) only so many names are looked at in all; after that the names are listed, as far as they are
//! few.

use std::cell::Cell;

/// Names that are looked at while one pipeline file is read.
const MOST_COMPARED: usize = 100_000;

/// Names that are listed where none is near.
const MOST_LISTED: usize = 40;

/// Of each list, where no more names are looked at.
const FEW_LISTED: usize = 3;

thread_local! {
    /// How many names may still be looked at; `None` is without a limit.
    static LEFT: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Does something that may make very many suggestions, within the limit.
pub(crate) fn limited<T>(work: impl FnOnce() -> T) -> T {
    /// Puts back what was there before, also where the work panics.
    struct Before(Option<usize>);
    impl Drop for Before {
        fn drop(&mut self) {
            LEFT.set(self.0);
        }
    }
    let _before = Before(LEFT.replace(Some(MOST_COMPARED)));
    work()
}

/// Whether no more names are looked at, so that they need not be gathered.
pub(crate) fn is_spent() -> bool {
    LEFT.get() == Some(0)
}

/// Takes as much from what is left as looking at so many names; false where nothing was left.
pub(crate) fn spend(names: usize) -> bool {
    match LEFT.get() {
        None => true,
        Some(0) => false,
        Some(left) => {
            LEFT.set(Some(left.saturating_sub(names)));
            true
        }
    }
}

/// The candidate nearest to `name`, if one is near enough to be a slip of the keyboard or of memory.
///
/// Edits count first (Damerau–Levenshtein, over lower-case letters, `-` and `_` being one): one for every three letters
/// of the longer name may differ, and one at least. Where no candidate is that near, a name is taken that begins the
/// same, is a part of the other or has all its words (`lr_scheduler` for `scheduler`, `max_len` for `max_seq_len`).
pub fn nearest<'a, S>(name: &str, candidates: impl IntoIterator<Item = &'a S>) -> Option<&'a str>
where
    S: AsRef<str> + ?Sized + 'a,
{
    let wanted = normal(name);
    let mut best: Option<(Distance, &'a str)> = None;
    for candidate in candidates {
        if !spend(1) {
            break;
        }
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
    let most = if is_spent() { FEW_LISTED } else { MOST_LISTED };
    let mut candidates = candidates.into_iter();
    let names: Vec<String> = candidates.by_ref().take(most).map(|name| format!("`{}`", name.as_ref())).collect();
    let more = match candidates.next() {
        None => String::new(),
        Some(_) if is_spent() => ", …".to_owned(),
        Some(_) => format!(" and {} more", 1 + candidates.count()),
    };
    (!names.is_empty()).then(|| format!("{what}: {}{more}", names.join(", ")))
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
    let lengths = [wanted, candidate].map(|name| name.chars().count());
    let longer = lengths[0].max(lengths[1]);
    let most = (longer / 3).max(1);
    // Each letter that one has more is an edit.
    let edits = match lengths[0].abs_diff(lengths[1]) {
        more if more > most => more,
        _ => strsim::damerau_levenshtein(wanted, candidate),
    };
    // Of very short names one letter is most of the name: `gpu` is not a slip for `cpu`.
    let begins_the_same = longer > 3 || wanted.chars().next() == candidate.chars().next();
    if edits <= most && edits < longer && begins_the_same {
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
    fn within_the_limit_so_many_names_are_looked_at_and_the_rest_is_listed() {
        let names: Vec<String> = (0..MOST_COMPARED).map(|number| format!("name-{number:06}")).collect();
        let near = || nearest("name-000_007x", &names);
        limited(|| {
            assert_eq!(near(), Some("name-000007"));
            assert!(is_spent());
            assert_eq!(near(), None);
            let listed = "names: `name-000000`, `name-000001`, `name-000002`, …";
            assert_eq!(help("name-000007", "names", &names).as_deref(), Some(listed));
        });
        assert_eq!(near(), Some("name-000007"));
    }

    #[test]
    fn help_lists_the_names_where_none_is_near() {
        assert_eq!(help("packss", "stages", &["packs", "base"]).as_deref(), Some("did you mean `packs`?"));
        assert_eq!(help("qqq", "stages", &["packs", "base"]).as_deref(), Some("stages: `packs`, `base`"));
        assert_eq!(help("qqq", "stages", &[] as &[&str]), None);
        let many: Vec<String> = (0..50).map(|number| format!("stage_{number}")).collect();
        assert!(help("qqq", "stages", &many).is_some_and(|help| help.ends_with("`stage_39` and 10 more")));
    }
}
