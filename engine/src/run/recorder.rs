//! Who is told what happens in a run: its folder, its observer, and the timeline where time is recorded.

use std::path::Path;

use super::event::RunEvent;
use super::timeline::Timeline;
use crate::history::RunFolder;
use crate::protocol::ProfileRequest;

/// Who is told.
pub(super) struct Recorder<'a> {
    folder: RunFolder,
    observer: &'a mut dyn FnMut(&RunEvent),
    /// Where the time goes, where that is recorded of some stage.
    timeline: Option<Timeline>,
}

impl<'a> Recorder<'a> {
    pub(super) fn new(folder: RunFolder, observer: &'a mut dyn FnMut(&RunEvent), timeline: Option<Timeline>) -> Self {
        Self { folder, observer, timeline }
    }

    /// Tells everybody.
    pub(super) fn tell(&mut self, event: RunEvent) {
        // A full disk fails the stages themselves; it must not keep the loop from stopping them in order.
        let _ = self.folder.append(&event);
        if let Some(timeline) = &mut self.timeline {
            timeline.hear(&event);
        }
        (self.observer)(&event);
    }

    /// A copy of a stage's result out of the store begins, which no event says.
    pub(super) fn publishing(&mut self, stage: &str) {
        self.timeline.iter_mut().for_each(|timeline| timeline.begin(stage, "publish"));
    }

    pub(super) fn folder(&self) -> &RunFolder {
        &self.folder
    }

    pub(super) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// The run's id.
    pub(super) fn run(&self) -> String {
        self.path().file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// What a stage's process has to know to fit into the timeline, where there is one.
    pub(super) fn profile_request(&self, stage: &str) -> Option<ProfileRequest> {
        Some(self.timeline.as_ref()?.request(stage))
    }

    /// Writes the trace of the run, where there is one.
    pub(super) fn finish(&self, pipeline: &str) {
        if let Some(timeline) = &self.timeline {
            // What the stages recorded is beside it, and a trace that cannot be written changes no result.
            let _ = timeline.write(pipeline, self.path());
        }
    }
}
