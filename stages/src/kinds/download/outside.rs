//! `copy: false`: the large files of a folder stay where they are, and the store has a note of each.

use engine::context::{Draft, StageContext};
use engine::error::StageError;
use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::forecast::Forecast;
use engine::protocol::FileGrant;

use super::{CONFIG, Download, Origin};
use crate::data::artifact::is_tokenizer_file;

/// From this length on a file stays. A copy of a smaller one takes hardly more than the note of it, and can neither
/// change nor be lost.
const LARGE: u64 = 64 << 10;

/// Leaves a file where it is, under a name of the output, if it is one that stays; whether it is.
pub(super) fn leave(
    params: &Download,
    file: &FileGrant,
    draft: &mut Draft,
    name: &str,
    context: &StageContext,
) -> Result<bool, StageError> {
    let stays = stays(params, file);
    if stays {
        context.leave(file, draft, name)?;
    }
    Ok(stays)
}

/// Whether a file stays: the tokenizer's files are those of a second output, too.
pub(super) fn stays(params: &Download, file: &FileGrant) -> bool {
    let name = file.relative.as_str();
    !params.copy && file.size >= LARGE && name != CONFIG && !is_tokenizer_file(name)
}

/// `copy: false` where there is nothing to leave.
pub(super) fn check(params: &Download, span: Span) -> Option<Problem> {
    let is_fetched = !params.copy && params.repo.is_some();
    let message = "`copy: false` belongs to `path`: what is fetched is kept in the store";
    let problem = || Problem::error("bad-source", span, message, "a repository's files are nowhere else");
    let help = "leave it out; or fetch the repository into a folder yourself, and give that as `path:`";
    is_fetched.then(|| problem().with_help(help).at("copy"))
}

/// What is said of it ahead.
pub(super) fn foretell(params: &Download, forecast: &mut Forecast) {
    if let (false, Some(Origin::Folder(path))) = (params.copy, params.origin()) {
        forecast.figure("copied", false, format!("no: files of 64 KiB and more stay in `{}`", path.text));
    }
}
