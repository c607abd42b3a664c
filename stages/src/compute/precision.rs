//! `dtype:` and `quantize:` of a model that generates or is evaluated: what is computed in, and how its weights are
//! stored.
//!
//! `dtype: int8` and `dtype: int4` are what files said before `quantize:` was: they mean `quantize:` of that name with
//! `dtype: f32`, and keep the keys of such stages as they were.

use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::file::tree::Node;
use engine::parameter::{
    Class, Fields, Json, KeyWriter, ObjectSchema, Parameter, Parameters, Reader, Record, choice_schema, read_choice,
};
use model::weights::BlockFormat;

use super::kernels::Dtype;
use super::quantize::WeightFormat;

/// What a model is computed in, and how its weights are stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Precision {
    /// The dtype that is computed in.
    pub dtype: Dtype,
    /// The format of its weights when it is loaded; that of the adapter's training if absent.
    pub quantize: Option<WeightFormat>,
    /// How the file says it.
    written: Spelling,
}

/// How a file asks for quantised weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Spelling {
    /// By `quantize`, or not at all.
    Quantize,
    /// By `dtype`.
    Dtype,
    /// By both.
    Both,
}

/// What a file may say.
#[derive(Parameters)]
struct Written {
    /// Compute dtype: that of the operands of matrix multiplications. `f16` is for `backend: torch`. `int8` and `int4`
    /// are older names of `quantize: int8` and `quantize: int4`.
    #[semantic(default = WrittenDtype::Dtype(Dtype::F32))]
    dtype: WrittenDtype,
    /// The format that weights are quantised to when the model is loaded: `int8` or `int4` (only `backend: native`
    /// with `cpu` kernels), or a base as in `train` (`{ base: nf4 }`, on the same backends). Default: the format
    /// that the adapter was trained on; without an adapter the stored weights. `none` leaves the
    /// format of the adapter out; a model that was trained with QAT computes as in training whatever is set.
    #[semantic]
    quantize: Option<WeightFormat>,
}

/// A dtype, or a format by its older name.
enum WrittenDtype {
    Dtype(Dtype),
    Format(BlockFormat),
}

/// The names of `dtype`, each with what it is.
const DTYPES: [(&str, &str); 5] = [
    ("f32", "32-bit floats."),
    ("bf16", "Matrix multiplications of bfloat16, summed in f32."),
    ("f16", "As `bf16`, in half precision; on GPUs and the torch worker."),
    ("int8", "An older name of `quantize: int8` with `dtype: f32`."),
    ("int4", "An older name of `quantize: int4` with `dtype: f32`."),
];

impl Parameter for WrittenDtype {
    fn read(node: &Node, reader: &mut Reader) -> Option<Self> {
        let name = read_choice(node, reader, &DTYPES.map(|(name, _)| name))?;
        let format = BlockFormat::ALL.into_iter().find(|format| format.name() == name);
        match format {
            Some(format) => Some(Self::Format(format)),
            None => Dtype::read(node, reader).map(Self::Dtype),
        }
    }

    fn write_key(&self, key: &mut KeyWriter<'_>) {
        match self {
            Self::Dtype(dtype) => dtype.write_key(key),
            Self::Format(format) => key.value(format.name()),
        }
    }

    fn schema() -> Json {
        choice_schema("", &DTYPES)
    }
}

impl Precision {
    /// To compute in a dtype, with weights in a format.
    pub fn new(dtype: Dtype, format: WeightFormat) -> Self {
        Self { dtype, quantize: Some(format), written: Spelling::Quantize }
    }

    /// What asks for quantised weights, as in the file.
    pub fn says(&self) -> Option<&'static str> {
        let format = self.quantize.as_ref()?;
        match (format, self.written) {
            (WeightFormat::Blocks(BlockFormat::Int8), Spelling::Dtype | Spelling::Both) => Some("`dtype: int8`"),
            (WeightFormat::Blocks(BlockFormat::Int4), Spelling::Dtype | Spelling::Both) => Some("`dtype: int4`"),
            _ => format.as_written(),
        }
    }

    /// What is wrong with it.
    pub fn problem(&self, span: Span) -> Option<Problem> {
        let quantize = self.quantize.as_ref()?;
        let WeightFormat::Blocks(format) = quantize else { return quantize.problem(span) };
        let format = format.name();
        match self.written {
            Spelling::Quantize => None,
            Spelling::Dtype => {
                let message = format!("`dtype: {format}` is an older name of `quantize: {format}`");
                let problem = Problem::warning("older-name", span, message, "how weights are stored, not a dtype");
                Some(
                    problem
                        .with_help(format!("write `quantize: {format}` instead: the result stays cached"))
                        .at("dtype"),
                )
            }
            Spelling::Both => {
                let message = format!(
                    "`dtype: {format}`, an older name of `quantize`, is given together with \
                    `quantize`"
                );
                let problem = Problem::error("bad-value", span, message, "how weights are stored, not a dtype");
                Some(problem.with_help("write `dtype: f32` or `dtype: bf16`, or leave it out").at("dtype"))
            }
        }
    }
}

impl Record for Precision {
    fn names() -> Vec<&'static str> {
        Written::names()
    }

    fn read_fields(fields: &mut Fields<'_>) -> Option<Self> {
        let written = Written::read_fields(fields)?;
        let quantize = written.quantize;
        Some(match written.dtype {
            WrittenDtype::Dtype(dtype) => Self { dtype, quantize, written: Spelling::Quantize },
            WrittenDtype::Format(format) => {
                let written = if quantize.is_some() { Spelling::Both } else { Spelling::Dtype };
                Self { dtype: Dtype::F32, quantize: Some(WeightFormat::Blocks(format)), written }
            }
        })
    }

    fn write_fields(&self, key: &mut KeyWriter<'_>) {
        let dtype = match (self.dtype, &self.quantize) {
            // As before `quantize` was.
            (Dtype::F32, Some(WeightFormat::Blocks(format))) => WrittenDtype::Format(*format),
            (dtype, _) => WrittenDtype::Dtype(dtype),
        };
        key.field("dtype", Class::Semantic, |key| dtype.write_key(key));
        if let Some(format) = &self.quantize {
            key.field("quantize", Class::Semantic, |key| match dtype {
                WrittenDtype::Dtype(_) => format.write_key(key),
                WrittenDtype::Format(_) => format.write_products_key(key),
            });
        }
    }

    fn add_to(schema: ObjectSchema) -> ObjectSchema {
        Written::add_to(schema)
    }
}

impl Parameter for Precision {
    fn read(node: &Node, reader: &mut Reader) -> Option<Self> {
        let mut fields = Fields::of(node, reader, &Self::names())?;
        Self::read_fields(&mut fields)
    }

    fn write_key(&self, key: &mut KeyWriter<'_>) {
        self.write_fields(key);
    }

    fn schema() -> Json {
        Written::schema()
    }
}

#[cfg(test)]
mod tests {
    use cache::KeyDocument;
    use serde_json::json;

    use super::*;

    fn read(json: &Json) -> Precision {
        let mut reader = Reader::default();
        let read = Precision::read(&Node::from_json(json), &mut reader);
        assert!(reader.problems.is_empty(), "{json}: {:?}", reader.problems);
        read.unwrap()
    }

    #[test]
    fn a_key_is_that_of_the_older_name_and_tells_all_else_apart() {
        let key = |json: Json| {
            let mut document = KeyDocument::default();
            read(&json).write_key(&mut KeyWriter::new(&mut document, &|_, _| None));
            document.entries.iter().map(|entry| format!("{} = {}", entry.path, entry.value)).collect::<Vec<_>>()
        };
        for (json, expected) in [
            (json!({}), &["dtype = f32"][..]),
            (json!({"dtype": "bf16"}), &["dtype = bf16"]),
            (json!({"dtype": "int8"}), &["dtype = int8", "quantize.integer_products = k_quants"]),
            (json!({"quantize": "int8"}), &["dtype = int8", "quantize.integer_products = k_quants"]),
            (json!({"dtype": "f32", "quantize": "int4"}), &["dtype = int4", "quantize.integer_products = k_quants"]),
            (
                json!({"dtype": "bf16", "quantize": "int4"}),
                &["dtype = bf16", "quantize = int4", "quantize.integer_products = k_quants"],
            ),
            (json!({"quantize": "none"}), &["dtype = f32", "quantize = none"]),
            (
                json!({"quantize": {"base": "nf4", "skip_modules": []}}),
                &[
                    "dtype = f32",
                    "quantize.base = nf4",
                    "quantize.double_quantization = true",
                    "quantize.block_size = 64",
                    "quantize.skip_modules = []",
                ],
            ),
        ] {
            assert_eq!(key(json.clone()), expected, "{json}");
        }
    }

    #[test]
    fn an_older_name_is_noted_and_refused_beside_the_newer_one() {
        let problem = |json: Json| read(&json).problem(Span::default()).map(|problem| problem.message);
        assert_eq!(problem(json!({"dtype": "bf16", "quantize": "int8"})), None);
        let found = problem(json!({"dtype": "int8"}));
        assert_eq!(found.as_deref(), Some("`dtype: int8` is an older name of `quantize: int8`"));
        let found = problem(json!({"dtype": "int4", "quantize": "int8"}));
        assert_eq!(
            found.as_deref(),
            Some("`dtype: int4`, an older name of `quantize`, is given together with `quantize`")
        );
    }
}
