//! What a stage process leaves behind where its time is recorded: `profile.json` and `trace.json` in its run folder.

use std::fs::{self, File};
use std::io::{self, BufWriter};
use std::path::PathBuf;

use profile::{Process, Profile, TraceWriter};

use crate::context::StageContext;
use crate::history::{PROFILE_FILE, TRACE_FILE};
use crate::protocol::ProfileRequest;

/// A recording that goes on, and where it is to be written.
pub(super) struct Recorder {
    profile: Profile,
    request: ProfileRequest,
    stage: String,
    folder: PathBuf,
}

impl Recorder {
    /// That of a stage, where there is one.
    pub(super) fn of(context: &StageContext) -> Option<Self> {
        let request = context.profile_request()?;
        let (stage, folder) = (context.stage().to_owned(), context.run_folder().to_owned());
        Some(Self { profile: context.profile().clone(), request, stage, folder })
    }

    /// Ends the recording and writes it.
    pub(super) fn write(self) -> io::Result<()> {
        let Some(recording) = self.profile.finish() else { return Ok(()) };
        fs::create_dir_all(&self.folder)?;
        let summary = serde_json::to_vec_pretty(&recording.summary())?;
        fs::write(self.folder.join(PROFILE_FILE), summary)?;
        let process = Process { number: self.request.process, name: self.stage };
        let mut writer = TraceWriter::new(BufWriter::new(File::create(self.folder.join(TRACE_FILE))?))?;
        for line in recording.trace(&process, self.request.origin_unix_micros) {
            writer.line(&line)?;
        }
        writer.finish()
    }
}
