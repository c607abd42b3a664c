//! Which instructions products of bf16 are computed with: chosen by measurement, once per machine and build, and kept.
//!
//! The name of a processor does not tell. Virtual machines make model numbers up, and of two processors that multiply
//! pairs of bf16 one does so at twice the rate of f32, the other at half of it. As the choice decides the bits of
//! results, it is kept by what the processor says of itself, and every process of the machine takes the one that is
//! kept.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use super::InstructionSet;
use crate::fingerprint;
use crate::ops::Compute;

/// Billions of operations a second of one thread, in products of bf16 that are summed in f32, by how they are computed.
/// What the machine lacks is zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    /// By the instruction for pairs.
    pub pairs: f64,
    /// In tiles.
    pub tiles: f64,
    /// Widened to f32.
    pub widened: f64,
}

impl Rates {
    /// The set that computes them fastest. Within a tenth they are equally fast, and the first in this order is it:
    /// pairs, tiles, widened to f32.
    pub fn fastest(self) -> InstructionSet {
        let ways = if cfg!(target_arch = "aarch64") {
            // Products of bytes are as fast in whichever way those of bf16 are.
            vec![(InstructionSet::NeonBf16, self.pairs), (InstructionSet::NeonDot, self.widened)]
        } else {
            vec![
                (InstructionSet::Avx512Bf16, self.pairs),
                (InstructionSet::Amx, self.tiles),
                (InstructionSet::Avx512, self.widened),
            ]
        };
        let best = ways.iter().fold(0.0, |best: f64, (_, rate)| best.max(*rate));
        ways.into_iter().find(|(_, rate)| 1.1 * rate >= best).expect("the best is one of them").0
    }
}

/// What is kept of a choice.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Kept {
    /// The processor and the build.
    machine: String,
    set: String,
    rates: Rates,
}

impl InstructionSet {
    /// The set that kernels compute in a type with, if none is named: that of [`InstructionSet::detect`] or, in bf16
    /// where there are several ways, the fastest. A choice that was made before is found in a folder, or kept
    /// there.
    pub fn chosen(compute: Compute, folder: Option<&Path>) -> Self {
        static CHOSEN: OnceLock<InstructionSet> = OnceLock::new();
        if compute == Compute::F32 || !Self::detect().multiplies_pairs() {
            return Self::detect();
        }
        *CHOSEN.get_or_init(|| choose(&machine(), folder, Rates::measure))
    }

    /// The set of a name, which is that for a log.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|set| set.name() == name)
    }
}

/// A measurement that is kept.
#[derive(Debug, Clone, Serialize)]
pub struct Measurement {
    /// The file.
    pub path: PathBuf,
    /// When it was made.
    #[serde(skip)]
    pub when: Option<SystemTime>,
    /// What it found.
    pub rates: Rates,
}

impl Measurement {
    /// That of this machine and build in a folder.
    pub fn kept(folder: &Path) -> Option<Self> {
        let (machine, path) = (machine(), file(folder, &machine()));
        let kept = read(&path, &machine)?;
        let when = std::fs::metadata(&path).and_then(|metadata| metadata.modified()).ok();
        Some(Self { path, when, rates: kept.rates })
    }
}

/// What the processor says of itself, and the build.
fn machine() -> String {
    format!("{} {}", super::limits::processor(), env!("CARGO_PKG_VERSION"))
}

/// The choice that is kept in a folder for a machine, or else one by these rates, which is then kept.
fn choose(machine: &str, folder: Option<&Path>, rates: impl FnOnce() -> Rates) -> InstructionSet {
    let path = folder.map(|folder| file(folder, machine));
    let kept = || path.as_deref().and_then(|path| read(path, machine)?.available());
    if let Some(set) = kept() {
        return set;
    }
    let rates = rates();
    let set = rates.fastest();
    let choice = Kept { machine: machine.to_owned(), set: set.name().to_owned(), rates };
    // Where it cannot be kept, the next process measures again.
    match path.as_deref().map(|path| keep(path, &choice)) {
        // Another process was first, and may have chosen otherwise.
        Some(Err(error)) if error.kind() == std::io::ErrorKind::AlreadyExists => kept().unwrap_or(set),
        _ => set,
    }
}

/// Where the choice for a machine is kept in a folder.
fn file(folder: &Path, machine: &str) -> PathBuf {
    folder.join(format!("cpu-kernels-{:016x}.json", fingerprint::of_bytes(machine.as_bytes())))
}

/// What is kept in a file, if it is of this machine.
fn read(path: &Path, machine: &str) -> Option<Kept> {
    let kept: Kept = serde_json::from_slice(&std::fs::read(path).ok()?).ok()?;
    (kept.machine == machine).then_some(kept)
}

impl Kept {
    /// Its set, if that can be used.
    fn available(&self) -> Option<InstructionSet> {
        InstructionSet::named(&self.set).filter(|set| set.is_available())
    }
}

/// Puts a choice into a file all at once, unless there is one that can be read.
fn keep(path: &Path, choice: &Kept) -> std::io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)?;
    if path.exists() && read(path, &choice.machine).and_then(|kept| kept.available()).is_none() {
        std::fs::remove_file(path)?;
    }
    let own = folder.join(format!(".cpu-kernels-{}", std::process::id()));
    let mut file = std::fs::File::create(&own)?;
    file.write_all(&serde_json::to_vec_pretty(choice)?)?;
    file.sync_all()?;
    let linked = std::fs::hard_link(&own, path);
    std::fs::remove_file(&own)?;
    linked
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The set of this architecture that multiplies pairs.
    const PAIRS: InstructionSet =
        if cfg!(target_arch = "aarch64") { InstructionSet::NeonBf16 } else { InstructionSet::Avx512Bf16 };
    /// The one that widens them to f32.
    const WIDENED: InstructionSet =
        if cfg!(target_arch = "aarch64") { InstructionSet::NeonDot } else { InstructionSet::Avx512 };

    #[test]
    fn the_fastest_is_chosen_and_of_equally_fast_ones_the_first() {
        // Zen 4 and later; Sapphire Rapids with its tiles, and where the system refuses them.
        let mut cases = vec![
            ((211.0, 0.0, 106.0), PAIRS),
            ((113.0, 0.0, 225.0), WIDENED),
            ((100.0, 0.0, 109.0), PAIRS),
            ((0.0, 0.0, 0.0), PAIRS),
        ];
        if !cfg!(target_arch = "aarch64") {
            cases.extend([
                ((113.0, 2240.0, 225.0), InstructionSet::Amx),
                ((100.0, 109.0, 104.0), PAIRS),
                ((100.0, 120.0, 125.0), InstructionSet::Amx),
            ]);
        }
        for ((pairs, tiles, widened), expected) in cases {
            assert_eq!(Rates { pairs, tiles, widened }.fastest(), expected, "{pairs} {tiles} {widened}");
        }
    }

    #[test]
    fn a_choice_is_kept_for_its_machine_and_made_anew_where_it_cannot_be_read() {
        let folder = tempfile::tempdir().expect("a folder");
        let place = folder.path().join("below");
        let portable = || choose("one", Some(&place), || unreachable!("it is kept"));
        let rates = Rates { pairs: 1.0, tiles: 0.0, widened: 2.0 };
        if !WIDENED.is_available() {
            return eprintln!("skipped: a choice of sets that this machine has not is none");
        }
        assert_eq!(choose("one", Some(&place), || rates), WIDENED);
        assert_eq!(portable(), WIDENED);
        let of_other = choose("two", Some(&place), || Rates { pairs: 0.0, tiles: 0.0, widened: 1.0 });
        assert_eq!(of_other, WIDENED);
        let files = || std::fs::read_dir(&place).expect("the folder").map(|entry| entry.expect("an entry").path());
        assert_eq!(files().count(), 2, "a file for each machine, and nothing else");
        files().for_each(|path| std::fs::write(path, "{").expect("to write"));
        assert_eq!(choose("one", Some(&place), || rates), WIDENED);
        assert_eq!(portable(), WIDENED, "the file was replaced");
        assert_eq!(choose("one", None, || rates), WIDENED, "without a folder");
    }

    #[test]
    fn of_processes_that_choose_at_once_all_take_the_first_choice() {
        if !WIDENED.is_available() {
            return eprintln!("skipped: a choice of sets that this machine has not is none");
        }
        let folder = tempfile::tempdir().expect("a folder");
        let widened = Rates { widened: 1.0, ..Rates::default() };
        let late = choose("one", Some(folder.path()), || {
            assert_eq!(choose("one", Some(folder.path()), || widened), WIDENED);
            Rates { pairs: 1.0, ..Rates::default() }
        });
        assert_eq!(late, WIDENED);
    }

    #[test]
    fn names_are_those_of_logs() {
        for set in InstructionSet::ALL {
            assert_eq!(InstructionSet::named(set.name()), Some(set));
        }
        assert_eq!(InstructionSet::named("sse"), None);
    }
}
