//! Errors in OpenAI's form.

use http_server::{Refusal, Response, StatusCode};
use serde_json::json;

/// Why a request is not answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ApiError {
    status: StatusCode,
    message: String,
    /// The field that is at fault.
    param: Option<String>,
    code: Option<&'static str>,
}

impl ApiError {
    fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, code: None }
    }

    /// A request that is wrong.
    pub(super) fn bad(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// A field that is wrong.
    pub(super) fn field(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..Self::bad(message) }
    }

    /// A field, or a value of one, that this server does not support.
    pub(super) fn unsupported(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { code: Some("unsupported_parameter"), ..Self::field(param, message) }
    }

    pub(super) fn too_long(message: impl Into<String>) -> Self {
        Self { code: Some("context_length_exceeded"), ..Self::field("messages", message) }
    }

    /// A request that is well formed, and that this model cannot be asked.
    pub(super) fn unprocessable(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..Self::new(StatusCode::UNPROCESSABLE_ENTITY, message) }
    }

    pub(super) fn no_model(name: &str, known: &[&str]) -> Self {
        let known: Vec<String> = known.iter().map(|name| format!("`{name}`")).collect();
        let message = format!("there is no model `{name}`; there are {}", known.join(", "));
        let error = Self::new(StatusCode::NOT_FOUND, message);
        Self { param: Some("model".to_owned()), code: Some("model_not_found"), ..error }
    }

    pub(super) fn no_path(path: &str) -> Self {
        Self { code: Some("not_found"), ..Self::new(StatusCode::NOT_FOUND, format!("there is nothing at `{path}`")) }
    }

    pub(super) fn method(allowed: &str) -> Self {
        Self::new(StatusCode::METHOD_NOT_ALLOWED, format!("this path supports {allowed}"))
    }

    pub(super) fn full() -> Self {
        let message = "the queue of the server is full: try again later";
        Self { code: Some("queue_full"), ..Self::new(StatusCode::TOO_MANY_REQUESTS, message) }
    }

    pub(super) fn unavailable(message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, message)
    }

    pub(super) fn timeout() -> Self {
        let message = "the request took longer than the server allows";
        Self { code: Some("timeout"), ..Self::new(StatusCode::GATEWAY_TIMEOUT, message) }
    }

    /// A completion that no token can follow.
    pub(super) fn stuck(message: String) -> Self {
        Self { code: Some("no_next_token"), ..Self::new(StatusCode::INTERNAL_SERVER_ERROR, message) }
    }

    pub(super) fn refused(refusal: Refusal) -> Self {
        let (message, code) = match refusal {
            Refusal::Host => ("this server does not serve the host that the request names".to_owned(), "bad_host"),
            Refusal::Token => ("`Authorization: Bearer` does not have this server's key".to_owned(), "invalid_api_key"),
            Refusal::BodyTooLarge { bytes } => (format!("the body has more than {bytes} bytes"), "body_too_large"),
            Refusal::BodyTimeout => ("the body did not arrive in time".to_owned(), "body_timeout"),
            Refusal::BadBody => ("the body is incomplete".to_owned(), "bad_body"),
        };
        Self { code: Some(code), ..Self::new(refusal.status(), message) }
    }

    /// The same about another field.
    pub(super) fn about(self, param: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..self }
    }

    pub(super) fn json(&self) -> serde_json::Value {
        let kind = match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        };
        json!({ "error": { "message": self.message, "type": kind, "param": self.param, "code": self.code } })
    }

    pub(super) fn response(&self) -> Response {
        let response = Response::json(self.status, self.json().to_string());
        match self.status {
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => response.retry_after(1),
            // It would take as long, or end there, again: OpenAI's clients retry any status of a server's but for this
            // header.
            StatusCode::GATEWAY_TIMEOUT | StatusCode::INTERNAL_SERVER_ERROR => {
                response.with_header("x-should-retry", "false")
            }
            StatusCode::UNAUTHORIZED => response.wants_bearer(),
            _ => response,
        }
    }
}
