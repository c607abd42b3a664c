//! One object from a shared store into a local file, part by part, hashed as it comes.

use std::fs::File;
use std::io::Write;
use std::ops::Range;
use std::path::Path;

use object_store::GetOptions;
use object_store::path::Path as Name;
use tokio::task::block_in_place;

use super::error::RemoteError;
use super::shared::Shared;
use crate::{Digest, StoreError, TreeFile};

/// How much is asked for at a time. A part that fails is asked for again, and not the whole file.
const PART: u64 = 8 << 20;

impl Shared {
    /// Fetches an object into a new file. Where this succeeds the file has the digest and the length that it should
    /// have; where it does not, what was written is worth nothing.
    pub(super) async fn download(
        &self,
        file: &TreeFile,
        place: &Path,
        moved: &(dyn Fn(u64) + Send + Sync),
    ) -> Result<(), RemoteError> {
        let mut target = block_in_place(|| File::create_new(place)).map_err(StoreError::on("create", place))?;
        let write = |part: &[u8]| {
            target.write_all(part).map_err(StoreError::on("write", place))?;
            moved(part.len() as u64);
            Ok(())
        };
        self.read_through(file, write).await
    }

    /// Whether an object has the content that its name says: all of it is read.
    pub(super) async fn is_sound(&self, file: &TreeFile) -> Result<bool, RemoteError> {
        match self.read_through(file, |_| Ok(())).await {
            Err(RemoteError::Refused { .. } | RemoteError::Missing { .. }) => Ok(false),
            read => read.map(|()| true),
        }
    }

    /// Reads an object part by part; succeeds if it has the digest and the length that it should have.
    async fn read_through(
        &self,
        file: &TreeFile,
        mut take: impl FnMut(&[u8]) -> Result<(), StoreError>,
    ) -> Result<(), RemoteError> {
        let name = self.object(&file.digest);
        let mut hasher = blake3::Hasher::new();
        let mut done = 0;
        while done < file.size {
            let range = done..file.size.min(done + PART);
            let wanted = range.end - range.start;
            let part = self.part(&name, range, file.size).await?;
            if part.len() as u64 != wanted {
                return Err(self.refuse(&name, "it ends before its length"));
            }
            block_in_place(|| {
                hasher.update_rayon(&part);
                take(&part)
            })?;
            done += wanted;
        }
        if Digest::from(hasher.finalize()) != file.digest {
            return Err(self.refuse(&name, "its content does not have the digest in its name"));
        }
        Ok(())
    }

    async fn part(&self, name: &Name, range: Range<u64>, size: u64) -> Result<Vec<u8>, RemoteError> {
        let options = GetOptions { range: Some(range.into()), ..GetOptions::default() };
        let found = match self.store().get_opts(name, options).await {
            Err(object_store::Error::NotFound { .. }) => return Err(self.missing(name)),
            // A range beyond the end has an answer of its own at each service: the length tells it from trouble on the
            // way.
            Err(error) => return Err(self.wrong_size(name, size).await?.unwrap_or_else(|| self.unread(name, &error))),
            Ok(found) => found,
        };
        if found.meta.size != size {
            return Err(self.refuse(name, format!("it has {} bytes instead of {size}", found.meta.size)));
        }
        Ok(found.bytes().await.map_err(|error| self.unread(name, &error))?.into())
    }

    async fn wrong_size(&self, name: &Name, size: u64) -> Result<Option<RemoteError>, RemoteError> {
        let found = self.size(name).await?;
        let wrong = found.filter(|found| *found != size);
        Ok(wrong.map(|found| self.refuse(name, format!("it has {found} bytes instead of {size}"))))
    }
}
