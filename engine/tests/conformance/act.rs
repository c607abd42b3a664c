//! A stage kind that does what it is told, good and bad.

#![allow(unsafe_code, reason = "limits and signals of a process")]

use std::hint::black_box;
use std::io::Write;
use std::thread::sleep;
use std::time::{Duration, Instant};

use engine::artifact::Output;
use engine::context::StageContext;
use engine::error::{Cause, StageError};
use engine::execute::Ranks;
use engine::parameter::Parameters;
use engine::protocol::WorkerEvent;
use engine::stage::{Stage, StageKind};
use nix::libc;
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::{Signal, raise};
use serde_json::json;

/// What it does, in the order of the fields.
#[derive(Debug, Parameters)]
pub(crate) struct Act {
    /// Says so many metrics.
    #[semantic(default)]
    metrics: u32,
    /// Prints so many lines that are no words of the protocol.
    #[semantic(default)]
    stray: u32,
    /// Reports a text of n bytes.
    #[semantic(default)]
    report_bytes: usize,
    /// Holds so much memory for a moment.
    #[semantic(default)]
    hold_mib: usize,
    /// Computes for so long.
    #[semantic(default)]
    compute_ms: u64,
    /// Waits for so long; where it is asked to stop meanwhile it says so and ends.
    #[semantic(default)]
    wait_ms: u64,
    /// Waits in vain to be killed.
    #[semantic(default)]
    never_ends: bool,
    /// Starts a rank on each of so many nodes, which says where it is.
    #[semantic(default)]
    nodes: usize,
    /// Fails with these words.
    #[semantic]
    fail: Option<String>,
    /// Exits with this code.
    #[semantic]
    code: Option<i32>,
    /// Dies of a segmentation fault.
    #[semantic(default)]
    crash: bool,
}

impl StageKind for Act {
    const NAME: &'static str = "act";
    const VERSION: u32 = 1;
    const ABOUT: &'static str = "does what it is told";
}

impl Stage for Act {
    fn outputs(&self) -> Vec<Output> {
        Vec::new()
    }

    fn run(&self, context: &mut StageContext) -> Result<(), StageError> {
        for step in 0..self.metrics {
            let values = json!({ "step": step });
            context.emit(WorkerEvent::Metrics { values: values.as_object().unwrap().clone() });
        }
        for line in 0..self.stray {
            let mut out = std::io::stdout().lock();
            writeln!(out, "stray {line}").unwrap();
            drop(out);
            // In one piece: others write to the same log.
            std::io::stderr().write_all(format!("error {line}\n").as_bytes()).unwrap();
        }
        if self.report_bytes > 0 {
            context.report("x".repeat(self.report_bytes));
        }
        if self.hold_mib > 0 {
            let held = vec![1_u8; self.hold_mib << 20];
            black_box(&held);
        }
        let until = Instant::now() + Duration::from_millis(self.compute_ms);
        while Instant::now() < until {
            black_box(0);
        }
        let until = Instant::now() + Duration::from_millis(self.wait_ms);
        while Instant::now() < until {
            if context.cancelled() {
                context.emit(WorkerEvent::Checkpoint { step: 7 });
                return Err(StageError::new(Cause::Cancelled, "it was asked to stop"));
            }
            sleep(Duration::from_millis(10));
        }
        if self.never_ends {
            loop {
                sleep(Duration::from_millis(100));
            }
        }
        if self.nodes > 0 {
            let says = r#"printf '{"event":"metrics","values":{"rank":%s,"of":%s,"node":"%s","at":"%s"}}\n' \
                "$RANK" "$WORLD_SIZE" "${SLURMD_NODENAME:-here}" "$MASTER_ADDR""#;
            let command = ["sh", "-c", says].map(Into::into).to_vec();
            let ranks = Ranks { nodes: self.nodes, per_node: 1, command, ..Ranks::default() };
            let running = ranks.start()?;
            running.attend(context, &mut |_, event, context| {
                context.emit(event);
                Ok(())
            })?;
        }
        if let Some(words) = &self.fail {
            return Err(StageError::new(Cause::BadData, words.clone()).with_help("do better"));
        }
        if let Some(code) = self.code {
            std::process::exit(code);
        }
        if self.crash {
            // The runtime's own handler would turn a real fault into an abort of its own.
            // SAFETY: the default action of a signal has no handler whose safety would have to hold.
            unsafe { libc::signal(libc::SIGSEGV, libc::SIG_DFL) };
            // Its core would be in the folder of the sources.
            setrlimit(Resource::RLIMIT_CORE, 0, 0).unwrap();
            raise(Signal::SIGSEGV).unwrap();
        }
        Ok(())
    }
}
