//! What a completion must hold to, token by token.

/// Says which tokens may follow a completion so far.
pub trait Constraint: Send + std::fmt::Debug {
    /// Sets the logits of tokens that may not follow to −∞; where the completion may end, `stop_token_ids` may follow.
    fn apply(&mut self, logits: &mut [f32], stop_token_ids: &[u32]);

    /// Takes the token that was chosen, and says whether any may follow.
    fn push(&mut self, token: u32) -> Next;

    /// Another one in the same state.
    fn boxed_clone(&self) -> Box<dyn Constraint>;
}

/// Whether a completion can go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// With a token, if not with its end.
    Any,
    /// Only its end may follow.
    End,
}

impl Clone for Box<dyn Constraint> {
    fn clone(&self) -> Self {
        self.boxed_clone()
    }
}
