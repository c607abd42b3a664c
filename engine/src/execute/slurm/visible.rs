//! Which devices of a node a process of a job sees, where Slurm does not tell its runtime.
//!
//! Slurm tells CUDA and ROCm which devices of a node are a job's, and Ascend's runtime nothing.

use devices::DeviceKind;

/// The kinds whose runtime Slurm tells nothing, each with its variable of visible devices.
pub(crate) fn untold() -> impl Iterator<Item = (DeviceKind, &'static str)> {
    let visible = DeviceKind::ALL.into_iter().filter_map(|kind| Some((kind, kind.facts().visible?)));
    visible.filter(|(_, visible)| !visible.is_set_by_slurm).map(|(kind, visible)| (kind, visible.variable))
}

/// Sets the variable in a job's batch script, unless somebody has.
pub(super) fn in_script(variable: &str) -> String {
    format!(
        "devices=${{SLURM_STEP_GPUS:-${{SLURM_JOB_GPUS:-}}}}\n\
         if [ -z \"${{{variable}:-}}\" ] && [ -n \"$devices\" ]; then\n\
         \x20   export {variable}=\"$devices\"\n\
         fi\n"
    )
}

/// Words before a command that runs on another node of the job, where the devices may be others.
pub(crate) fn on_node(variable: &str) -> [String; 4] {
    let set = format!(r#"export {variable}="${{SLURM_STEP_GPUS:-${{SLURM_JOB_GPUS:-${variable}}}}}"; exec "$@""#);
    ["sh".to_owned(), "-c".to_owned(), set, "sh".to_owned()]
}
