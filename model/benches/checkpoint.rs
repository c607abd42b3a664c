//! Times the reading of a checkpoint and the merge of an adapter into it, beside what the machine reads and copies in
//! the same run.
//!
//! ```text
//! cargo run --release -p model --example random_checkpoint -- FOLDER
//! cargo bench -p model --bench checkpoint -- --folder FOLDER --out OUT --threads 2 --rounds 3
//! ```
//!
//! `FOLDER/base` is loaded in each type that is computed in, `FOLDER/adapter` merged into it and the merge proved on as
//! many tokens as the `merge` stage takes where it is given no rows. What is written goes to a folder in `OUT` and is
//! removed; without it the system's for temporary files is taken, and one in memory leaves the disk out. The work goes
//! in turn, so many rounds. `--cold yes` drops the files from the page cache before each reading (by `dd …
//! iflag=nocache`). Prints a line of JSON for each piece of work: seconds, processor seconds, and gigabytes of stored
//! weights a second, the medians of the rounds; and the ratio to the bare `read` or `copy` of the same files, or to
//! `fill`: writing to fresh memory, as much as the weights take in f32, which loading them takes at least.

#[path = "support/machine.rs"]
mod machine;

use std::any::Any;
use std::error::Error;
use std::fs::{self, File};
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use memmap2::MmapMut;
use model::batch::Batch;
use model::checkpoint::Checkpoint;
use model::cpu::Cpu;
use model::decoder::Decoder;
use model::merge::{Merge, MergeOptions, WeightedAdapter};
use model::ops::Compute;
use model::parameter::Trainability;
use model::peft::Adapter;
use model::random::{Address, Purpose, Stream};
use model::weights::{Activations, BlockFormat, Quantization};

use machine::process_time;

/// Bytes that a thread of the bare reading and copying takes at a time.
const PIECE: u64 = 1 << 20;

/// Rows that the proof compares, and their tokens.
const PROOF: (u64, usize) = (4, 32);

type Failure = Box<dyn Error + Send + Sync>;
type Outcome = Result<(), Failure>;

fn main() -> Outcome {
    let arguments = Arguments::parse(std::env::args().skip(1))?;
    let bench = Bench::of(&arguments)?;
    let pool = rayon::ThreadPoolBuilder::new().num_threads(arguments.threads).build()?;
    let mut figures: Vec<Figures> = Vec::new();
    for round in 0..arguments.rounds {
        for (index, (name, beside, work)) in WORK.iter().enumerate() {
            if *name != "prove" && arguments.cold {
                bench.files.iter().try_for_each(|file| forget(file))?;
            }
            let (before, began) = (process_time(), Instant::now());
            let made = pool.install(|| work(&bench))?;
            let took = (began.elapsed().as_secs_f64(), (process_time() - before).as_secs_f64());
            if round == 0 {
                figures.push(Figures { name, beside, took: Vec::new() });
            }
            figures[index].took.push(took);
            // That the system takes its memory back is no part of loading.
            drop(made);
        }
    }
    print(&figures, bench.bytes as f64 / 1e9, &arguments);
    Ok(())
}

/// What is timed, and beside which of those before.
type Piece = (&'static str, Option<&'static str>, fn(&Bench) -> Made);

/// What is left when a piece of work is done.
type Made = Result<Option<Box<dyn Any + Send>>, Failure>;

const WORK: &[Piece] = &[
    ("read", None, |bench| bench.read(|_, _, _| Ok(())).map(|()| None)),
    ("copy", None, |bench| bench.copy().map(|()| None)),
    ("fill", None, |bench| bench.fill()),
    ("load f32", Some("fill"), |bench| bench.load(Compute::F32, None)),
    ("load bf16", Some("read"), |bench| bench.load(Compute::Bf16, None)),
    ("load int8", Some("read"), |bench| bench.load(Compute::F32, Some(BlockFormat::Int8))),
    ("merge", Some("copy"), |bench| bench.merge().map(|()| None)),
    ("prove", Some("read"), |bench| bench.prove().map(|()| None)),
];

/// The times of a piece of work: on the clock and of the processor, in seconds.
struct Figures {
    name: &'static str,
    beside: &'static Option<&'static str>,
    took: Vec<(f64, f64)>,
}

struct Arguments {
    folder: PathBuf,
    out: PathBuf,
    threads: usize,
    rounds: usize,
    cold: bool,
}

impl Arguments {
    fn parse(mut words: impl Iterator<Item = String>) -> Result<Self, Failure> {
        let (mut folder, mut out) = (None, std::env::temp_dir());
        let (mut threads, mut rounds, mut cold) = (2, 3, false);
        while let Some(word) = words.next() {
            // cargo adds this one.
            if word == "--bench" {
                continue;
            }
            let value = words.next().ok_or_else(|| format!("`{word}` has no value"))?;
            match word.as_str() {
                "--folder" => folder = Some(PathBuf::from(value)),
                "--out" => out = PathBuf::from(value),
                "--threads" => threads = value.parse::<usize>()?.max(1),
                "--rounds" => rounds = value.parse::<usize>()?.max(1),
                "--cold" => cold = value == "yes",
                _ => return Err(format!("there is no argument `{word}`").into()),
            }
        }
        let folder = folder.ok_or("`--folder` is missing")?;
        Ok(Self { folder, out: out.join(format!("checkpoint-bench-{}", std::process::id())), threads, rounds, cold })
    }
}

struct Bench {
    base: PathBuf,
    out: PathBuf,
    files: Vec<PathBuf>,
    bytes: u64,
    /// Of the weights, once they are f32.
    wide_bytes: usize,
    adapter: Adapter,
    batches: Vec<Batch>,
    threads: usize,
}

impl Drop for Bench {
    fn drop(&mut self) {
        // What is left over harms nobody.
        let _ = fs::remove_dir_all(&self.out);
    }
}

impl Bench {
    fn of(arguments: &Arguments) -> Result<Self, Failure> {
        let base = arguments.folder.join("base");
        let checkpoint = Checkpoint::open(&base)?;
        let files: Vec<PathBuf> = checkpoint.files().map(Path::to_path_buf).collect();
        let wide_bytes = checkpoint.tensors().map(|(_, info)| 4 * info.elements()).sum();
        let sizes = files.iter().map(|file| Ok(fs::metadata(file)?.len()));
        let bytes = sizes.sum::<std::io::Result<u64>>()?;
        let vocab_size = model::config::Config::read(&base)?.vocab_size as u64;
        let adapter = Adapter::load(&arguments.folder.join("adapter"))?;
        let mut batch = Batch::default();
        for row in 0..PROOF.0 {
            let mut stream = Stream::new(0, Address::new(Purpose::Sampling).row(row));
            batch.extend(&Batch::text((0..PROOF.1).map(|_| stream.below(vocab_size) as u32).collect()));
        }
        let (out, threads) = (arguments.out.clone(), arguments.threads);
        Ok(Self { base, out, files, bytes, wide_bytes, adapter, batches: vec![batch], threads })
    }

    /// Reads the files on all threads, and hands each piece on with the number of its file and its place there.
    fn read(&self, each: impl Fn(usize, u64, &[u8]) -> std::io::Result<()> + Sync) -> Outcome {
        for (index, path) in self.files.iter().enumerate() {
            let (file, next) = (File::open(path)?, AtomicU64::new(0));
            let length = file.metadata()?.len();
            let on_a_thread = || -> std::io::Result<()> {
                let mut buffer = vec![0; PIECE as usize];
                loop {
                    let first = next.fetch_add(PIECE, Ordering::Relaxed);
                    if first >= length {
                        return Ok(());
                    }
                    let piece = &mut buffer[..PIECE.min(length - first) as usize];
                    file.read_exact_at(piece, first)?;
                    each(index, first, piece)?;
                }
            };
            std::thread::scope(|scope| {
                let threads: Vec<_> = (0..self.threads).map(|_| scope.spawn(on_a_thread)).collect();
                threads.into_iter().try_for_each(|thread| thread.join().expect("reading does not panic"))
            })?;
        }
        Ok(())
    }

    fn copy(&self) -> Outcome {
        self.empty_out()?;
        let create = |index: usize| File::create(self.out.join(format!("copy-{index}")));
        let copies = (0..self.files.len()).map(create).collect::<std::io::Result<Vec<_>>>()?;
        self.read(|index, first, piece| copies[index].write_all_at(piece, first))
    }

    /// Writes to memory that nobody has touched, in huge pages where the system gives them, on all threads.
    fn fill(&self) -> Made {
        let mut memory = MmapMut::map_anon(self.wide_bytes)?;
        #[cfg(target_os = "linux")]
        memory.advise(memmap2::Advice::HugePage)?;
        let share = self.wide_bytes.div_ceil(self.threads);
        std::thread::scope(|scope| {
            memory.chunks_mut(share).for_each(|part| drop(scope.spawn(|| part.fill(1))));
        });
        Ok(Some(Box::new(memory)))
    }

    fn load(&self, compute: Compute, quantize: Option<BlockFormat>) -> Made {
        let mut ops = Cpu::new(self.threads, compute)?;
        if let Some(format) = quantize {
            ops = ops.quantizing(Quantization { format, activations: Activations::Int8 });
        }
        Ok(Some(Box::new(Decoder::load(Arc::new(ops), &self.base, Trainability::Frozen)?)))
    }

    fn merge(&self) -> Outcome {
        self.empty_out()?;
        self.with_merge(|merge| Ok(merge.write(&self.out, &mut |_| ControlFlow::Continue(())).map(drop)?))
    }

    fn prove(&self) -> Outcome {
        let ops = Arc::new(Cpu::new(self.threads, Compute::F32)?.for_passing_weights());
        self.with_merge(|merge| {
            let proof = merge.prove(&ops, &self.out, &self.batches, &mut |_| ControlFlow::Continue(()))?;
            Ok(proof.check()?)
        })
    }

    fn with_merge(&self, run: impl FnOnce(&Merge<'_>) -> Outcome) -> Outcome {
        let adapters = [WeightedAdapter { adapter: &self.adapter, weight: 1.0 }];
        run(&Merge::new(&self.base, &adapters, MergeOptions::default())?)
    }

    fn empty_out(&self) -> std::io::Result<()> {
        if self.out.exists() {
            fs::remove_dir_all(&self.out)?;
        }
        fs::create_dir_all(&self.out)
    }
}

/// Drops a file from the page cache.
fn forget(file: &Path) -> Outcome {
    let mut dd = Command::new("dd");
    dd.arg(format!("if={}", file.display())).args(["iflag=nocache", "count=0"]).stderr(Stdio::null());
    if dd.status()?.success() { Ok(()) } else { Err("`dd` cannot drop the file from the page cache".into()) }
}

fn print(figures: &[Figures], gigabytes: f64, arguments: &Arguments) {
    let seconds = |figures: &Figures| median(figures.took.iter().map(|(wall, _)| *wall).collect());
    for of_piece in figures {
        let wall = seconds(of_piece);
        let mut line = serde_json::json!({
            "work": of_piece.name,
            "gigabytes": rounded(gigabytes),
            "threads": arguments.threads,
            "cold": arguments.cold,
            "seconds": rounded(wall),
            "cpu_seconds": rounded(median(of_piece.took.iter().map(|(_, cpu)| *cpu).collect())),
            "gigabytes_per_second": rounded(gigabytes / wall),
        });
        if let Some(beside) = of_piece.beside.and_then(|name| figures.iter().find(|other| other.name == name)) {
            line[format!("of_{}", beside.name)] = rounded(seconds(beside) / wall).into();
        }
        println!("{line}");
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Three digits are enough.
fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}
