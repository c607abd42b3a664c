//! The token that a client has to show, as `Authorization: Bearer …`.

use blake3::Hash;

/// A token. It is kept as a digest, and compared as one: in constant time, whatever its length and content.
#[derive(Clone)]
pub struct Token(Hash);

impl Token {
    /// This token.
    pub fn new(token: &str) -> Self {
        Self(blake3::hash(token.as_bytes()))
    }

    /// Whether an `Authorization` header, if there is one, shows it.
    pub(crate) fn is_shown_by(&self, authorization: Option<&[u8]>) -> bool {
        let Some((scheme, token)) = authorization.and_then(|value| value.split_at_checked(b"Bearer ".len())) else {
            return false;
        };
        // The comparison of digests is that of the crate, which takes the same time for all.
        scheme.eq_ignore_ascii_case(b"Bearer ") && blake3::hash(token.trim_ascii()) == self.0
    }
}

impl std::fmt::Debug for Token {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Token(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_token_itself_is_taken() {
        let token = Token::new("secret");
        for shown in ["Bearer secret", "bearer secret", "Bearer  secret "] {
            assert!(token.is_shown_by(Some(shown.as_bytes())), "{shown}");
        }
        for shown in ["Bearer secre", "Bearer secrets", "Bearer ", "Bearer", "secret", "Basic secret", ""] {
            assert!(!token.is_shown_by(Some(shown.as_bytes())), "{shown}");
        }
        assert!(!token.is_shown_by(None));
        assert!(!format!("{token:?}").contains("secret"));
    }
}
