//! Rows of files that are there already, for stages that make data files: columns and template as in `uses: dataset`,
//! nothing else.

use std::ops::ControlFlow;
use std::path::Path;

use cache::Digest;
use engine::artifact::Facts;
use engine::context::StageContext;
use engine::error::StageError;
use engine::parameter::Mapping;

use super::Dataset;
use super::form::SourceFile;
use super::recipe::Recipe;
use super::template_choice::TemplateChoice;
use super::{expression, first_with_columns};
use crate::data::artifact::{RowCounts, RowsWriter};

/// Writes the rows of files, one file after the other, as a Rows artefact into a folder, and gives its facts and
/// identity. A row that cannot be used is an error.
///
/// # Errors
/// Fails where the files contain no rows or something else than rows, and where the disk refuses.
pub(crate) fn rows_of_files(
    template: Option<&TemplateChoice>,
    column_map: &Mapping<String>,
    files: &[SourceFile],
    folder: &Path,
    context: &mut StageContext,
) -> Result<(Facts, Digest), StageError> {
    let params = Dataset::of_files(template.cloned(), column_map.clone());
    let reading = params.reading();
    let (first, columns) = first_with_columns(|| files.iter(), &reading)?;
    let environment = expression::environment();
    let recipe = Recipe::plan(&params, &environment, &columns, first, &reading)?;
    let mut writer = RowsWriter::create(folder, recipe.facts().clone());
    let (mut counts, mut rows) = (RowCounts::default(), 0_u64);
    for file in files {
        file.read(0..u64::MAX, &recipe.wanted(), &reading, &mut |record| {
            let (number, made) = match record {
                Ok(record) => (record.number, recipe.row(record)),
                Err(bad) => (bad.number, Err(bad.flaw)),
            };
            match made {
                Ok(ControlFlow::Continue(made)) => {
                    counts.empty += u64::from(made.empty);
                    writer.write(made.row)?;
                }
                Ok(ControlFlow::Break(())) => {}
                Err(flaw) => return Err(StageError::bad_data(format!("{}: {}", file.place(number), flaw.problem))),
            }
            rows += 1;
            if rows.is_multiple_of(1024) {
                context.stop_if_cancelled()?;
                context.progress("rows", rows, None, None);
            }
            Ok(ControlFlow::Continue(()))
        })?;
    }
    if rows == 0 {
        return Err(StageError::bad_data("the files contain no rows"));
    }
    Ok(writer.finish_counted(&counts)?)
}
