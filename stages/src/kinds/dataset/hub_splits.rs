//! Which files of a Hub dataset are which split: as its README says, else by the Hub's own rules for names.
//!
//! Source: `datasets/data_files.py` of Hugging Face datasets 5.2.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use engine::error::StageError;
use engine::suggest;
use glob::{MatchOptions, Pattern};

use super::LOCAL_SPLIT;
use super::form::Form;
use super::hub_card::Configuration;

/// The words that name a split in a path, with the split.
const KEYWORDS: &[(&str, &str)] = &[
    ("train", "train"),
    ("training", "train"),
    ("validation", "validation"),
    ("valid", "validation"),
    ("dev", "validation"),
    ("val", "validation"),
    ("test", "test"),
    ("testing", "test"),
    ("eval", "test"),
    ("evaluation", "test"),
];

/// The files of each split, by its name.
pub(super) type Splits = BTreeMap<String, Vec<String>>;

/// Whether a file can hold rows: it has a form that can be read, and does not describe the others.
pub(super) fn is_data(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or_default().to_ascii_lowercase();
    let describes = [
        "readme.md",
        "config.json",
        "dataset_info.json",
        "dataset_infos.json",
        "dataset_dict.json",
        "license.txt",
        "requirements.txt",
    ];
    let hidden = path.split('/').any(|part| part.starts_with(['.', '_']));
    !hidden && !describes.contains(&name.as_str()) && Form::of(Path::new(&name)).is_some()
}

/// The configuration that is meant, among those of a README.
pub(super) fn configuration<'a>(
    declared: &'a [Configuration],
    asked: Option<&str>,
) -> Result<Option<&'a Configuration>, StageError> {
    let names = || declared.iter().map(|configuration| configuration.name.as_str()).collect::<Vec<_>>();
    if declared.is_empty() {
        return Ok(None);
    }
    if let Some(asked) = asked {
        let found = declared.iter().find(|configuration| configuration.name == asked);
        return match found {
            Some(found) => Ok(Some(found)),
            None => Err(no_configuration(asked, &names())),
        };
    }
    let default = declared.iter().find(|configuration| configuration.is_default);
    let default = default.or_else(|| declared.iter().find(|configuration| configuration.name == "default"));
    match (default, declared) {
        (Some(default), _) => Ok(Some(default)),
        (None, [only]) => Ok(Some(only)),
        (None, _) => Err(several_configurations(&names())),
    }
}

fn no_configuration(asked: &str, names: &[&str]) -> StageError {
    let help = suggest::help(asked, "configuration", names.iter());
    StageError { help, ..StageError::bad_data(format!("the dataset has no configuration `{asked}`")) }
}

fn several_configurations(names: &[&str]) -> StageError {
    let names: Vec<_> = names.iter().map(|name| format!("`{name}`")).collect();
    StageError::bad_data(format!("the dataset has several configurations: {}", names.join(", ")))
        .with_help("choose one with `config:`")
}

/// The files of the splits of these names. `paths` are those of all data files; `configuration` is what the README
/// says.
pub(super) fn choose(
    paths: &[&str],
    configuration: Option<&Configuration>,
    asked: Option<&str>,
    names: &[&str],
) -> Result<Splits, StageError> {
    let mut paths = paths.to_vec();
    paths.sort_unstable();
    let all = match configuration {
        Some(Configuration { data_files: Some(files), data_dir, .. }) => {
            by_patterns(&paths, files, data_dir.as_deref().unwrap_or_default())?
        }
        Some(Configuration { data_dir: Some(folder), .. }) => by_names(&of_one_form(&below(&paths, folder)), folder),
        Some(_) | None if is_conversion(&paths) => of_conversion(&paths, asked)?,
        Some(_) => by_names(&of_one_form(&paths), ""),
        None => by_names(&of_folder(&of_one_form(&paths), asked)?, ""),
    };
    let mut splits = Splits::new();
    for name in names {
        let Some(files) = all.get(*name).filter(|files| !files.is_empty()) else {
            let help = suggest::help(name, "split", all.keys());
            return Err(StageError {
                help,
                ..StageError::bad_data(format!("the dataset has no files of a split `{name}`"))
            });
        };
        splits.insert((*name).to_owned(), files.clone());
    }
    Ok(splits)
}

/// Parquet is the Hub's own form; where it is there, other files are sources of it.
fn of_one_form<'a>(paths: &[&'a str]) -> Vec<&'a str> {
    let parquet: Vec<&str> = paths.iter().copied().filter(|path| path.ends_with(".parquet")).collect();
    if parquet.is_empty() { paths.to_vec() } else { parquet }
}

fn below<'a>(paths: &[&'a str], folder: &str) -> Vec<&'a str> {
    let folder = format!("{}/", folder.trim_start_matches("./").trim_end_matches('/'));
    paths.iter().copied().filter(|path| path.starts_with(&folder)).collect()
}

/// The files that the README's patterns fit, in the order of the patterns.
fn by_patterns(paths: &[&str], data_files: &[(String, Vec<String>)], folder: &str) -> Result<Splits, StageError> {
    let options =
        MatchOptions { case_sensitive: true, require_literal_separator: true, require_literal_leading_dot: false };
    let folder = folder.trim_start_matches("./").trim_end_matches('/');
    let mut splits = Splits::new();
    for (split, patterns) in data_files {
        let mut files = Vec::new();
        for written in patterns {
            let relative = written.trim_start_matches("./");
            let whole = if folder.is_empty() { relative.to_owned() } else { format!("{folder}/{relative}") };
            let pattern = Pattern::new(&whole).map_err(|error| {
                StageError::bad_data(format!("the README names files by `{written}`, which is no pattern"))
                    .with_source(error)
            })?;
            let within = format!("{}/", whole.trim_end_matches('/'));
            let fits = |path: &&str| pattern.matches_with(path, options) || path.starts_with(&within);
            for path in paths.iter().copied().filter(fits) {
                if !files.iter().any(|known| known == path) {
                    files.push(path.to_owned());
                }
            }
        }
        splits.insert(split.clone(), files);
    }
    Ok(splits)
}

/// Whether these are the files of the Hub's own conversion: `configuration/split/0000.parquet`.
fn is_conversion(paths: &[&str]) -> bool {
    let fits = |path: &&str| {
        let parts: Vec<&str> = path.split('/').collect();
        let number = |name: &str| {
            name.strip_suffix(".parquet").is_some_and(|n| n.len() == 4 && n.bytes().all(|b| b.is_ascii_digit()))
        };
        parts.len() == 3 && number(parts[2])
    };
    !paths.is_empty() && paths.iter().all(fits)
}

/// The splits of one converted configuration. Of a large split the Hub may have converted the beginning alone:
/// `partial-train`.
fn of_conversion(paths: &[&str], asked: Option<&str>) -> Result<Splits, StageError> {
    let folder = |path: &&str| path.split('/').next().unwrap_or_default().to_owned();
    let folders: BTreeSet<String> = paths.iter().map(folder).collect();
    let names: Vec<&str> = folders.iter().map(String::as_str).collect();
    let chosen = match (asked, names.as_slice()) {
        (Some(asked), _) if folders.contains(asked) => asked,
        (Some(asked), _) => return Err(no_configuration(asked, &names)),
        (None, [only]) => only,
        (None, _) if folders.contains("default") => "default",
        (None, _) => return Err(several_configurations(&names)),
    };
    let mut splits = Splits::new();
    for path in paths.iter().filter(|path| folder(path) == chosen) {
        let split = path.split('/').nth(1).unwrap_or_default();
        let split = split.strip_prefix("partial-").unwrap_or(split).to_owned();
        splits.entry(split).or_default().push((*path).to_owned());
    }
    Ok(splits)
}

/// The files of a configuration whose folder has its name. Without one, those of the only folder, or of `default`.
fn of_folder<'a>(paths: &[&'a str], asked: Option<&str>) -> Result<Vec<&'a str>, StageError> {
    let folder = |path: &'a str| path.split_once('/').map_or("", |(folder, _)| folder);
    let names_a_split = |name: &str| words(name).any(|word| split_of(word).is_some());
    let folders: BTreeSet<&str> = paths.iter().map(|path| folder(path)).filter(|name| !names_a_split(name)).collect();
    let names: Vec<&str> = folders.iter().copied().collect();
    let chosen = match asked {
        Some(asked) => asked,
        None if folders.len() <= 1 => return Ok(paths.to_vec()),
        None if folders.contains("default") => "default",
        None => return Err(several_configurations(&names)),
    };
    let files: Vec<&str> = paths.iter().copied().filter(|path| path.split('/').any(|part| part == chosen)).collect();
    if files.is_empty() { Err(no_configuration(chosen, &names)) } else { Ok(files) }
}

/// Tells the split of a path, where it can.
type Rule<'a> = dyn Fn(&str) -> Option<String> + 'a;

/// The splits that names tell: of shards `data/name-00000-of-00001.parquet`, else of folders, else of files. Where they
/// tell none, all files are `train`.
fn by_names(paths: &[&str], folder: &str) -> Splits {
    let inside = |path: &str| path.strip_prefix(folder).unwrap_or(path).trim_start_matches('/').to_owned();
    let of_folders = |path: &str| {
        let inside = inside(path);
        let folders = inside.rsplit_once('/').map_or("", |(folders, _)| folders).to_owned();
        folders.split('/').find_map(|folder| words(folder).find_map(split_of)).map(str::to_owned)
    };
    let of_file = |path: &str| {
        let inside = inside(path);
        let name = inside.rsplit('/').next().unwrap_or_default().to_owned();
        words(&name).find_map(split_of).map(str::to_owned)
    };
    let rules: [&Rule<'_>; 3] = [&|path| shard(&inside(path)), &of_folders, &of_file];
    for rule in rules {
        let mut splits = Splits::new();
        for path in paths {
            if let Some(split) = rule(path) {
                splits.entry(split).or_default().push((*path).to_owned());
            }
        }
        if !splits.is_empty() {
            return splits;
        }
    }
    Splits::from([(LOCAL_SPLIT.to_owned(), paths.iter().map(|path| (*path).to_owned()).collect())])
}

/// The split of `data/train_sft-00000-of-00003-0123.parquet`.
fn shard(path: &str) -> Option<String> {
    let name = path.strip_prefix("data/").filter(|name| !name.contains('/'))?;
    let digits = |text: &str| text.len() >= 5 && text.as_bytes()[..5].iter().all(u8::is_ascii_digit);
    let at = name.find("-of-")?;
    let (before, behind) = (&name[..at], &name[at + 4..]);
    let (split, number) = before.rsplit_once('-')?;
    (number.len() == 5 && digits(number) && digits(behind) && !split.is_empty()).then(|| split.to_owned())
}

/// The words of a name: letters between the characters that the Hub takes for separators.
fn words(name: &str) -> impl Iterator<Item = &str> {
    name.split(|letter: char| "-._ ".contains(letter) || letter.is_ascii_digit()).filter(|word| !word.is_empty())
}

fn split_of(word: &str) -> Option<&'static str> {
    KEYWORDS.iter().find(|(keyword, _)| *keyword == word).map(|(_, split)| *split)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn splits(paths: &[&str], names: &[&str]) -> Result<Splits, StageError> {
        choose(paths, None, None, names)
    }

    #[test]
    fn the_hubs_conversion_is_understood() {
        let paths = ["default/train/0000.parquet", "default/train/0001.parquet", "default/test/0000.parquet"];
        let made = splits(&paths, &["train"]).unwrap();
        assert_eq!(made["train"], ["default/train/0000.parquet", "default/train/0001.parquet"]);
        assert!(splits(&paths, &["validation"]).unwrap_err().message.contains("validation"));
        let paths = ["dev/train/0000.parquet", "test/partial-train/0000.parquet", "test/extra/0000.parquet"];
        assert!(splits(&paths, &["train"]).unwrap_err().message.contains("`dev`, `test`"));
        let of = |asked, name| choose(&paths, None, Some(asked), &[name]).unwrap()[name].clone();
        assert_eq!(of("dev", "train"), ["dev/train/0000.parquet"]);
        assert_eq!(of("test", "train"), ["test/partial-train/0000.parquet"]);
        assert_eq!(of("test", "extra"), ["test/extra/0000.parquet"]);
    }

    #[test]
    fn numbered_files_are_understood_whatever_their_split_is_called() {
        let paths = ["data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet", "data.csv"];
        let made = splits(&paths, &["test", "train"]).unwrap();
        assert_eq!(made["test"], ["data/test-00000-of-00001.parquet"]);
        assert_eq!(made["train"], ["data/train-00000-of-00001.parquet"]);
        let paths = [
            "data/train_sft-00000-of-00002-a3ec.parquet",
            "data/train_sft-00001-of-00002-0a7b.parquet",
            "data/test_gen-00000-of-00001.parquet",
        ];
        assert_eq!(splits(&paths, &["train_sft"]).unwrap()["train_sft"].len(), 2);
        let error = splits(&paths, &["train"]).unwrap_err();
        assert!(error.help.unwrap().contains("train_sft"));
    }

    #[test]
    fn words_of_folders_and_files_name_splits() {
        let made =
            splits(&["my-training/a.csv", "dev/b.csv", "evaluation2/c.csv"], &["train", "validation", "test"]).unwrap();
        assert_eq!((made["train"].len(), made["validation"].len(), made["test"].len()), (1, 1, 1));
        let made =
            splits(&["xsum_train1.jsonl.gz", "xsum-val.jsonl.gz", "trainer.jsonl"], &["train", "validation"]).unwrap();
        assert_eq!(made["train"], ["xsum_train1.jsonl.gz"]);
        assert_eq!(made["validation"], ["xsum-val.jsonl.gz"]);
    }

    #[test]
    fn files_without_a_split_in_their_names_are_all_train() {
        let made = splits(&["b.jsonl", "a.jsonl"], &["train"]).unwrap();
        assert_eq!(made["train"], ["a.jsonl", "b.jsonl"]);
    }

    #[test]
    fn one_of_several_folders_must_be_chosen() {
        let paths = ["main/train-0.parquet", "socratic/train-0.parquet"];
        let error = splits(&paths, &["train"]).unwrap_err();
        assert!(error.message.contains("`main`, `socratic`"), "{}", error.message);
        assert_eq!(choose(&paths, None, Some("main"), &["train"]).unwrap()["train"], ["main/train-0.parquet"]);
        assert!(choose(&paths, None, Some("mian"), &["train"]).is_err());
    }

    #[test]
    fn the_readme_decides_where_it_says_something() {
        let paths = ["main/train-0.parquet", "main/deep/train-1.parquet", "other/x.csv", "held/out.csv"];
        let declare = |name: &str, files: &[(&str, &[&str])]| Configuration {
            name: name.to_owned(),
            data_files: Some(
                files
                    .iter()
                    .map(|(split, paths)| ((*split).to_owned(), paths.iter().map(|path| (*path).to_owned()).collect()))
                    .collect(),
            ),
            ..Configuration::default()
        };
        let one = declare("one", &[("train", &["main/train-*"]), ("test", &["held", "other/*.csv"])]);
        let made = choose(&paths, Some(&one), None, &["train", "test"]).unwrap();
        assert_eq!(made["train"], ["main/train-0.parquet"], "`*` stops at a folder");
        assert_eq!(
            made["test"],
            ["held/out.csv", "other/x.csv"],
            "a folder is all that is in it; patterns keep their order"
        );
        let deep = declare("deep", &[("train", &["main/**/train-*"])]);
        assert_eq!(choose(&paths, Some(&deep), None, &["train"]).unwrap()["train"].len(), 2);
        let folder = Configuration { data_dir: Some("main".to_owned()), ..Configuration::default() };
        assert_eq!(choose(&paths, Some(&folder), None, &["train"]).unwrap()["train"].len(), 2);

        let mut declared = vec![one, deep];
        assert!(configuration(&declared, None).unwrap_err().message.contains("`one`, `deep`"));
        assert_eq!(configuration(&declared, Some("deep")).unwrap().unwrap().name, "deep");
        assert!(configuration(&declared, Some("dep")).unwrap_err().help.unwrap().contains("`deep`"));
        declared[1].is_default = true;
        assert_eq!(configuration(&declared, None).unwrap().unwrap().name, "deep");
        assert_eq!(configuration(&declared[..1], None).unwrap().unwrap().name, "one");
        assert_eq!(configuration(&[], Some("any")).unwrap(), None);
    }

    #[test]
    fn what_describes_the_data_is_no_data() {
        for path in [
            "README.md",
            "dataset_infos.json",
            ".gitattributes",
            ".hidden/a.csv",
            "_draft/a.csv",
            "xsum.py",
            "a.tar.gz",
        ] {
            assert!(!is_data(path), "{path}");
        }
        for path in ["a.csv", "deep/a.jsonl.gz", "data/train-00000-of-00001.parquet"] {
            assert!(is_data(path), "{path}");
        }
    }
}
