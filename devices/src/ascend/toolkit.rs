//! Which CANN is installed, and which of it a process will find.

use crate::doctor::Subject;

/// The variables by which CANN's `set_env.sh` says where it is.
const HOMES: [&str; 2] = ["ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH"];

/// Where it is installed unless somebody says otherwise: from 8.5 on in the first place.
const PLACES: [&str; 2] = ["/usr/local/Ascend/cann", "/usr/local/Ascend/ascend-toolkit/latest"];

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Cann {
    /// Its version, such as `8.2.RC1`.
    pub version: String,
    /// The file that says so.
    pub file: String,
    /// Whether the environment points to it.
    pub in_environment: bool,
}

/// The CANN of a machine: that of the environment, else one at its usual place.
pub(super) fn cann(subject: &Subject) -> Option<Cann> {
    let named = HOMES.iter().filter_map(|name| subject.variable(name)).map(|home| (home.to_owned(), true));
    let usual = PLACES.iter().map(|home| ((*home).to_owned(), false));
    named.chain(usual).find_map(|(home, in_environment)| {
        let files =
            ["aarch64-linux", "x86_64-linux"].map(|folder| format!("{home}/{folder}/ascend_toolkit_install.info"));
        let (file, text) = files.into_iter().find_map(|file| Some((file.clone(), subject.machine.read(&file)?)))?;
        let version = text.lines().find_map(|line| line.trim().strip_prefix("version="))?.trim().to_owned();
        Some(Cann { version, file, in_environment })
    })
}

/// The version of Ascend's driver package.
pub(super) fn driver(subject: &Subject) -> Option<String> {
    let text = subject.machine.read("/usr/local/Ascend/driver/version.info")?;
    text.lines().find_map(|line| line.trim().strip_prefix("Version=")).map(|version| version.trim().to_owned())
}
