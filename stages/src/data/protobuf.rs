//! Writing protocol buffers by hand: TensorBoard's curves and the records of trackers need a few messages, and no
//! generated code.

/// Wire types.
const VARINT: u32 = 0;
const FIXED_64: u32 = 1;
const BYTES: u32 = 2;
const FIXED_32: u32 = 5;

/// A message that grows by its fields.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Message(Vec<u8>);

impl Message {
    /// One without fields.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an integer; one below zero as its two's complement, as `int32` and `int64` have it.
    #[must_use]
    pub fn int(mut self, field: u32, value: i64) -> Self {
        self.key(field, VARINT);
        self.number(value.cast_unsigned());
        self
    }

    /// Adds a `float`.
    #[must_use]
    pub fn float(mut self, field: u32, value: f32) -> Self {
        self.key(field, FIXED_32);
        self.0.extend(value.to_le_bytes());
        self
    }

    /// Adds a `double`.
    #[must_use]
    pub fn double(mut self, field: u32, value: f64) -> Self {
        self.key(field, FIXED_64);
        self.0.extend(value.to_le_bytes());
        self
    }

    /// Adds a text.
    #[must_use]
    pub fn text(self, field: u32, text: &str) -> Self {
        self.bytes(field, text.as_bytes())
    }

    /// Adds a text where there is one.
    #[must_use]
    pub fn text_if(self, field: u32, text: Option<&str>) -> Self {
        match text {
            Some(text) => self.text(field, text),
            None => self,
        }
    }

    /// Adds each text, as a repeated field.
    #[must_use]
    pub fn texts(self, field: u32, texts: &[String]) -> Self {
        texts.iter().fold(self, |message, text| message.text(field, text))
    }

    /// Adds another message.
    #[must_use]
    pub fn message(self, field: u32, message: &Self) -> Self {
        self.bytes(field, &message.0)
    }

    /// The bytes.
    pub fn into_bytes(self) -> Vec<u8> {
        self.0
    }

    fn bytes(mut self, field: u32, bytes: &[u8]) -> Self {
        self.key(field, BYTES);
        self.number(bytes.len() as u64);
        self.0.extend(bytes);
        self
    }

    fn key(&mut self, field: u32, wire_type: u32) {
        self.number(u64::from(field << 3 | wire_type));
    }

    /// Seven bits to a byte, the lowest first; the top bit says that more follow.
    fn number(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }
}

#[cfg(test)]
mod tests {
    use super::Message;

    /// The examples of the encoding's own description (protobuf.dev, "Encoding").
    #[test]
    fn fields_are_encoded_as_described() {
        assert_eq!(Message::new().int(1, 150).into_bytes(), [0x08, 0x96, 0x01]);
        assert_eq!(Message::new().text(2, "testing").into_bytes(), *b"\x12\x07testing");
        let inner = Message::new().int(1, 150);
        assert_eq!(Message::new().message(3, &inner).into_bytes(), [0x1a, 0x03, 0x08, 0x96, 0x01]);
        assert_eq!(Message::new().int(1, -2).into_bytes(), [8, 0xfe, 255, 255, 255, 255, 255, 255, 255, 255, 1]);
        assert_eq!(Message::new().double(1, 1.0).float(2, 1.0).into_bytes()[9..], [0x15, 0, 0, 0x80, 0x3f]);
    }
}
