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

/// Words of other programs, each with the names that it may stand for here. One of them is suggested where it is among
/// the candidates.
const SYNONYMS: &[(&str, &[&str])] = &[
    ("fp16", &["f16"]),
    ("float16", &["f16"]),
    ("half", &["f16"]),
    ("bfloat16", &["bf16"]),
    ("fp32", &["f32"]),
    ("float32", &["f32"]),
    ("float", &["f32"]),
    ("gpu", &["cuda", "rocm", "metal"]),
    ("ppl", &["perplexity"]),
    ("qlora", &["lora"]),
    ("cosine_with_warmup", &["cosine"]),
    ("linear_with_warmup", &["linear"]),
    ("constant_with_warmup", &["constant"]),
];

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
/// of the longer name may differ, for every four where the first letters differ, and one at least. Where no candidate
/// is that near, a name is taken that begins the same, has the other's words in a row (`scheduler` for `lr_scheduler`,
/// not `model` for `load_best_model_at_end`) or all of them (`max_len` for `max_seq_len`).
pub fn nearest<'a, S>(name: &str, candidates: impl IntoIterator<Item = &'a S>) -> Option<&'a str>
where
    S: AsRef<str> + ?Sized + 'a,
{
    closest(name, candidates, |_| true)
}

/// The candidate of which `name` is a misspelling, as [`nearest`] finds it by edits alone.
pub(crate) fn misspelled<'a, S>(name: &str, candidates: impl IntoIterator<Item = &'a S>) -> Option<&'a str>
where
    S: AsRef<str> + ?Sized + 'a,
{
    closest(name, candidates, |distance| matches!(distance, Distance::Edits(_)))
}

fn closest<'a, S>(
    name: &str,
    candidates: impl IntoIterator<Item = &'a S>,
    is_near: impl Fn(&Distance) -> bool,
) -> Option<&'a str>
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
        let Some(distance) = distance(&wanted, &normal(candidate)).filter(&is_near) else { continue };
        if best.as_ref().is_none_or(|(least, _)| distance.is_less_than(least)) {
            best = Some((distance, candidate));
        }
    }
    best.map(|(_, candidate)| candidate)
}

/// A help line: what another program's word stands for, else the nearest candidate, else all of them where they are few
/// enough to read. The name itself is never suggested.
pub fn help<'a, S>(name: &str, what: &str, candidates: impl IntoIterator<Item = &'a S> + Clone) -> Option<String>
where
    S: AsRef<str> + ?Sized + 'a,
{
    if let Some(meant) = meant(name, candidates.clone()) {
        return Some(format!("did you mean {meant}?"));
    }
    if let Some(nearest) = nearest(name, candidates.clone()).filter(|nearest| *nearest != name) {
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

/// The candidates that a word of another program stands for: `` `cuda`, `rocm` or `metal` ``.
fn meant<'a, S>(name: &str, candidates: impl IntoIterator<Item = &'a S>) -> Option<String>
where
    S: AsRef<str> + ?Sized + 'a,
{
    let (_, ours) = SYNONYMS.iter().find(|(word, _)| word.eq_ignore_ascii_case(name))?;
    let known: Vec<&str> = candidates.into_iter().take_while(|_| spend(1)).map(|known| known.as_ref()).collect();
    let meant: Vec<String> = ours.iter().filter(|name| known.contains(*name)).map(|name| format!("`{name}`")).collect();
    match meant.split_last()? {
        (only, []) => Some(only.clone()),
        (last, others) => Some(format!("{} or {last}", others.join(", "))),
    }
}

/// How far a candidate is from the name.
enum Distance {
    Edits(usize),
    /// They have words in common, or begin the same; the value is one minus Jaro–Winkler similarity.
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
    // A slip seldom hits the first letter.
    let is_same_letter = wanted.chars().next() == candidate.chars().next();
    let most = (longer / if is_same_letter { 3 } else { 4 }).max(1);
    // Each letter that one has more is an edit.
    let edits = match lengths[0].abs_diff(lengths[1]) {
        more if more > most => more,
        _ => strsim::damerau_levenshtein(wanted, candidate),
    };
    // Of very short names one letter is most of the name: `gpu` is not a slip for `cpu`. Of short ones a letter more in
    // front makes another word: `type` is not a slip for `dtype`.
    let may_be_slip = match longer {
        0..=3 => is_same_letter,
        4..=5 => is_same_letter || lengths[0] == lengths[1],
        _ => true,
    };
    if edits <= most && edits < longer && may_be_slip {
        return Some(Distance::Edits(edits));
    }
    let similarity = strsim::jaro_winkler(wanted, candidate);
    let is_related = contained(wanted, candidate)
        || initials(wanted, candidate)
        || words_within(wanted, candidate)
        || (similarity >= 0.9 && may_be_slip);
    is_related.then_some(Distance::Related(1.0 - similarity))
}

/// Whether one of the names begins with the other, or has all the other's words in a row. Of a name that has more, the
/// candidate must be the half at least: `model` says little of `load_best_model_at_end`.
fn contained(wanted: &str, candidate: &str) -> bool {
    if wanted.len().min(candidate.len()) < 4 {
        return false;
    }
    let begins = wanted.starts_with(candidate) || candidate.starts_with(wanted);
    let is_half = 2 * candidate.len() >= wanted.len();
    begins || has_words_of(candidate, wanted) || (is_half && has_words_of(wanted, candidate))
}

/// Whether a name has the words of a part in a row.
fn has_words_of(name: &str, part: &str) -> bool {
    let part = words(part);
    words(name).windows(part.len()).any(|words| words == part)
}

fn words(name: &str) -> Vec<&str> {
    name.split(|letter: char| !letter.is_alphanumeric()).collect()
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
    fn slips_of_one_or_two_letters_find_their_name() {
        let slips = [
            ("modle", "model"),
            ("nodel", "model"),
            ("sauce", "source"),
            ("epoch", "epochs"),
            ("optimzer", "optimizer"),
            ("shceduler", "scheduler"),
            ("gradient_acumulation_stpes", "gradient_accumulation_steps"),
            ("enable_activation_checkpointing", "activation_checkpointing"),
            ("batch_size", "micro_batch_size"),
            ("warmup", "warmup_steps"),
            ("data", "dataset"),
            ("rank", "lora.rank"),
            ("model_name_or_path", "model"),
        ];
        for (name, meant) in slips {
            assert_eq!(nearest(name, &[meant]), Some(meant), "{name}");
        }
    }

    #[test]
    fn names_that_only_look_alike_find_nothing() {
        let others = [
            ("save_steps", "max_steps"),
            ("type", "dtype"),
            ("source", "resources"),
            ("load_best_model_at_end", "model"),
            ("lr", "rank"),
        ];
        for (name, other) in others {
            assert_eq!(nearest(name, &[other]), None, "{name}");
        }
    }

    #[test]
    fn misspelled_names_are_found_by_edits_alone() {
        assert_eq!(misspelled("learning_rat", &["learning_rate"]), Some("learning_rate"));
        assert_eq!(misspelled("lr", &["learning_rate"]), None);
    }

    #[test]
    fn words_of_other_programs_stand_for_names_of_ours() {
        let said = |name, known: &[&str]| help(name, "known values", known.iter().copied()).unwrap();
        let dtypes = ["f32", "bf16", "f16"];
        assert_eq!(said("float16", &dtypes), "did you mean `f16`?");
        assert_eq!(said("bfloat16", &dtypes), "did you mean `bf16`?");
        assert_eq!(said("float32", &dtypes), "did you mean `f32`?");
        assert_eq!(said("ppl", &["bleu", "perplexity"]), "did you mean `perplexity`?");
        assert_eq!(said("gpu", &["cpu", "cuda", "rocm", "metal"]), "did you mean `cuda`, `rocm` or `metal`?");
        assert_eq!(said("gpu", &["cpu", "npu"]), "known values: `cpu`, `npu`");
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
