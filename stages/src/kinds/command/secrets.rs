//! Values of `pass_env` in what a program leaves: refused in outputs, which are kept, shared and published, and removed
//! from what it keeps for its next try.

use std::ffi::OsStr;
use std::fs::{self, File, Permissions};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use engine::context::StageContext;
use engine::error::{Cause, OrFail, StageError};

use super::mask::Masker;

/// Where a value was found.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Found {
    /// In a path below the folder, which cannot be told therefore, or in where a link leads.
    Name(PathBuf),
    /// In the content of a file.
    Content(PathBuf),
}

/// Makes sure that an output holds no value.
pub(super) fn refuse(output: &str, folder: &Path, masker: &Masker) -> Result<(), StageError> {
    let found = find(folder, masker).or_fail(Cause::Machine, || format!("cannot read `{}`", folder.display()))?;
    let message = match found.first() {
        None => return Ok(()),
        Some(Found::Name(_)) => {
            format!(
                "a name in the output `{output}`, or the target of a link, contains the value of a variable of \
                 `pass_env`"
            )
        }
        Some(Found::Content(path)) => {
            let file = path.strip_prefix(folder).unwrap_or(path).display();
            format!("`{file}` of the output `{output}` contains the value of a variable of `pass_env`")
        }
    };
    Err(StageError::bad_data(message)
        .with_help("nothing of it was stored; a value that is no secret belongs under `env:`"))
}

/// Keeps the folder for the next try to this user, and removes what holds a value there. What a program that was killed
/// left is looked at before the next one starts. Where a link stands in its place, that alone is removed.
pub(super) fn clean_working(context: &mut StageContext, masker: &Masker) -> Result<(), StageError> {
    let folder = context.working().to_owned();
    super::own_working(&folder)?;
    if masker.secrets().is_empty() {
        return Ok(());
    }
    let failed = || format!("cannot look through `{}`", folder.display());
    fs::set_permissions(&folder, Permissions::from_mode(0o700)).or_fail(Cause::Machine, failed)?;
    let found = find(&folder, masker).or_fail(Cause::Machine, failed)?;
    for found in &found {
        let (Found::Name(path) | Found::Content(path)) = found;
        let removed = match fs::symlink_metadata(path) {
            Ok(entry) if entry.is_dir() => fs::remove_dir_all(path),
            Ok(_) => fs::remove_file(path),
            Err(error) => Err(error),
        };
        // One in a folder that is gone already is gone too.
        match removed {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(error).or_fail(Cause::Machine, failed);
            }
            _ => {}
        }
    }
    if !found.is_empty() {
        context.warn(format!(
            "{} of what the program kept in PIPELINE_WORKING held the value of a variable of `pass_env` and was \
             removed",
            found.len()
        ));
    }
    Ok(())
}

/// All below a folder that hold a value, each folder before what is in it.
fn find(folder: &Path, masker: &Masker) -> io::Result<Vec<Found>> {
    let mut found = Vec::new();
    if !masker.secrets().is_empty() {
        walk(folder, folder, masker, &mut found)?;
    }
    Ok(found)
}

fn walk(root: &Path, folder: &Path, masker: &Masker, found: &mut Vec<Found>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let (path, kind) = (entry.path(), entry.file_type()?);
        let has = |text: &OsStr| masker.secrets().iter().any(|secret| holds(text.as_bytes(), secret));
        // The whole path: a value may have slashes in it.
        let is_named = has(path.strip_prefix(root).unwrap_or(&path).as_os_str())
            || (kind.is_symlink() && fs::read_link(&path).is_ok_and(|target| has(target.as_os_str())));
        if is_named {
            found.push(Found::Name(path));
        } else if kind.is_dir() {
            walk(root, &path, masker, found)?;
        } else if kind.is_file() && holds_any(&path, masker.secrets())? {
            found.push(Found::Content(path));
        }
    }
    Ok(())
}

fn holds_any(path: &Path, secrets: &[Vec<u8>]) -> io::Result<bool> {
    let overlap = secrets.iter().map(Vec::len).max().unwrap_or(1) - 1;
    let mut file = File::open(path)?;
    let mut window = Vec::with_capacity(overlap + (1 << 18));
    let mut buffer = vec![0; 1 << 18];
    loop {
        let read = file.read(&mut buffer)?;
        if read == 0 {
            return Ok(false);
        }
        window.extend_from_slice(&buffer[..read]);
        if secrets.iter().any(|secret| holds(&window, secret)) {
            return Ok(true);
        }
        window.drain(..window.len().saturating_sub(overlap));
    }
}

fn holds(text: &[u8], wanted: &[u8]) -> bool {
    let (first, starts) = (wanted[0], text.len().saturating_sub(wanted.len() - 1));
    (0..starts).any(|at| text[at] == first && text[at..].starts_with(wanted))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "s3cr/et-\"value";

    #[test]
    fn a_value_is_found_in_names_links_and_contents() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        fs::create_dir_all(at("a/plain")).unwrap();
        fs::write(at("a/plain/file"), "nothing").unwrap();
        let masker = Masker::new([SECRET]);
        assert_eq!(find(root.path(), &masker).unwrap(), []);

        fs::create_dir_all(at("a/x-s3cr")).unwrap();
        fs::write(at("a/x-s3cr/et-\"value.txt"), "a path that a slash divides").unwrap();
        fs::write(at("b"), format!("{}{SECRET}", "x".repeat((1 << 18) - 3))).unwrap();
        fs::write(at("c.json"), serde_json::to_string(&[SECRET]).unwrap()).unwrap();
        std::os::unix::fs::symlink(format!("/tmp/{SECRET}"), at("d")).unwrap();
        let mut found = find(root.path(), &masker).unwrap();
        found.sort_by_key(|found| match found {
            Found::Name(path) | Found::Content(path) => path.clone(),
        });
        let expected = [
            Found::Name(at("a/x-s3cr/et-\"value.txt")),
            Found::Content(at("b")),
            Found::Content(at("c.json")),
            Found::Name(at("d")),
        ];
        assert_eq!(found, expected);
        assert_eq!(find(root.path(), &Masker::new([])).unwrap(), []);
    }
}
