//! The messages of a stream, and how far a sender may be ahead: pure.
//!
//! ```text
//! message   kind u16 | credits u16 | length u32 | bytes          little-endian
//! ```
//!
//! Each end may send [`WINDOW`] messages with bytes that the other's reader has not taken. A message that was read
//! makes a *credit*, which goes back with the next message, or in a *word*, a message without bytes, when half of
//! the window is owed. Words need no credit; one is on its way at a time.
//!
//! At every moment: what one end may still send, what is on its way, what is unread and what is owed
//! there, and the credits on their way back, are together the window.

/// Most bytes of a message.
pub const MESSAGE_BYTES: usize = 8 << 10;
/// Bytes before those of the stream.
pub const HEAD_BYTES: usize = 8;
/// Messages with bytes that the other end has not read.
pub const WINDOW: u16 = 16;

const BYTES: u16 = 0xeb01;
const WORD: u16 = 0xeb02;

/// What a message is, without its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// Messages that were read at the other end.
    pub credits: u16,
    /// How many bytes follow; none in a word.
    pub len: u32,
}

/// What the other end must not do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FlowError {
    /// Not this protocol.
    #[error("the other end does not speak this protocol over RDMA")]
    Malformed,
    /// More than the window.
    #[error("the other end sends more over RDMA than it may")]
    Overrun,
    /// More credits than messages.
    #[error("the other end says that it has read more than it was sent")]
    Credits,
}

impl Head {
    /// As it travels.
    #[must_use]
    pub fn encode(self) -> [u8; HEAD_BYTES] {
        let kind = if self.len == 0 { WORD } else { BYTES };
        let mut out = [0; HEAD_BYTES];
        out[..2].copy_from_slice(&kind.to_le_bytes());
        out[2..4].copy_from_slice(&self.credits.to_le_bytes());
        out[4..].copy_from_slice(&self.len.to_le_bytes());
        out
    }

    /// Of a whole message, with its bytes.
    pub fn decode(message: &[u8]) -> Result<(Head, &[u8]), FlowError> {
        let (head, bytes) = message.split_at_checked(HEAD_BYTES).ok_or(FlowError::Malformed)?;
        let kind = u16::from_le_bytes([head[0], head[1]]);
        let credits = u16::from_le_bytes([head[2], head[3]]);
        let len = u32::from_le_bytes([head[4], head[5], head[6], head[7]]);
        let fits = len as usize == bytes.len() && message.len() <= MESSAGE_BYTES;
        match kind {
            BYTES if fits && len > 0 => Ok((Head { credits, len }, bytes)),
            WORD if fits && len == 0 && credits > 0 => Ok((Head { credits, len }, bytes)),
            _ => Err(FlowError::Malformed),
        }
    }
}

/// One end's account.
#[derive(Clone, Debug)]
pub struct Flow {
    may_send: u16,
    unread: u16,
    owed: u16,
    word_out: bool,
}

impl Default for Flow {
    fn default() -> Flow {
        Flow { may_send: WINDOW, unread: 0, owed: 0, word_out: false }
    }
}

impl Flow {
    /// Whether a message with bytes may go out.
    #[must_use]
    pub fn may_send(&self) -> bool {
        self.may_send > 0
    }

    /// One goes out: the credits that go with it.
    pub fn send(&mut self) -> u16 {
        assert!(self.may_send > 0, "asked before");
        self.may_send -= 1;
        std::mem::take(&mut self.owed)
    }

    /// Whether a word is due.
    #[must_use]
    pub fn wants_word(&self) -> bool {
        self.owed >= WINDOW / 2 && !self.word_out
    }

    /// It goes out.
    pub fn send_word(&mut self) -> u16 {
        self.word_out = true;
        std::mem::take(&mut self.owed)
    }

    /// It has arrived.
    pub fn word_arrived(&mut self) {
        self.word_out = false;
    }

    /// A message has come.
    pub fn receive(&mut self, head: Head) -> Result<(), FlowError> {
        let may_send = self.may_send.checked_add(head.credits).filter(|n| *n <= WINDOW);
        self.may_send = may_send.ok_or(FlowError::Credits)?;
        if head.len > 0 {
            if self.unread + self.owed >= WINDOW {
                return Err(FlowError::Overrun);
            }
            self.unread += 1;
        }
        Ok(())
    }

    /// A message was read to its end.
    pub fn read(&mut self) {
        assert!(self.unread > 0, "it has come before");
        self.unread -= 1;
        self.owed += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    /// One end, and what is on its way to it.
    #[derive(Default)]
    struct End {
        flow: Flow,
        wire: VecDeque<(Head, bool)>,
        sent: u64,
        unread: u64,
        read: u64,
    }

    fn step(ends: &mut [End; 2], who: usize, act: u8) {
        let [a, b] = ends;
        let (me, other) = if who == 0 { (a, b) } else { (b, a) };
        match act {
            0 if me.flow.may_send() => {
                me.sent += 1;
                let credits = me.flow.send();
                other.wire.push_back((Head { credits, len: 1 }, false));
            }
            1 => {
                if let Some((head, is_word)) = me.wire.pop_front() {
                    me.flow.receive(head).expect("an honest end keeps to it");
                    me.unread += u64::from(head.len);
                    if is_word {
                        other.flow.word_arrived();
                    }
                }
            }
            2 if me.unread > 0 => {
                me.unread -= 1;
                me.read += 1;
                me.flow.read();
            }
            _ => {}
        }
        if me.flow.wants_word() {
            let credits = me.flow.send_word();
            other.wire.push_back((Head { credits, len: 0 }, true));
        }
    }

    proptest! {
        #[test]
        fn honest_ends_never_overrun_and_never_stand_still(
            acts in prop::collection::vec((0..2usize, 0..3u8), 0..2000),
        ) {
            let mut ends = [End::default(), End::default()];
            for (who, act) in acts {
                step(&mut ends, who, act);
                for who in 0..2 {
                    let (me, other) = (&ends[who], &ends[1 - who]);
                    // The reference: what was sent and not read is at most the window.
                    prop_assert!(me.sent - other.read <= u64::from(WINDOW));
                    prop_assert!(me.wire.iter().filter(|(_, word)| *word).count() <= 1);
                }
            }
            // Whatever happened: when both read, both can send again.
            for _ in 0..4 * WINDOW {
                for who in 0..2 {
                    step(&mut ends, who, 1);
                    step(&mut ends, who, 2);
                }
            }
            for who in 0..2 {
                prop_assert!(ends[who].flow.may_send());
                prop_assert_eq!(ends[who].sent, ends[1 - who].read);
            }
        }

        #[test]
        fn what_is_encoded_is_decoded(credits in 0..=WINDOW, len in 0..200usize) {
            let head = Head { credits, len: len as u32 };
            let message = [&head.encode()[..], &vec![7; len]].concat();
            let decoded = Head::decode(&message);
            match len == 0 && credits == 0 {
                true => prop_assert_eq!(decoded, Err(FlowError::Malformed), "says nothing"),
                false => prop_assert_eq!(decoded, Ok((head, &message[HEAD_BYTES..]))),
            }
        }

        #[test]
        fn any_bytes_are_a_message_as_they_are_encoded_or_none(
            message in prop::collection::vec(any::<u8>(), 0..64),
        ) {
            if let Ok((head, bytes)) = Head::decode(&message) {
                prop_assert_eq!([&head.encode()[..], bytes].concat(), message);
            }
        }
    }

    #[test]
    fn what_an_end_must_not_do_is_told() {
        let mut flow = Flow::default();
        assert_eq!(flow.receive(Head { credits: 1, len: 1 }), Err(FlowError::Credits));
        let mut flow = Flow::default();
        let one = Head { credits: 0, len: 1 };
        for _ in 0..WINDOW {
            flow.receive(one).unwrap();
        }
        assert_eq!(flow.receive(one), Err(FlowError::Overrun));
        flow.read();
        assert_eq!(flow.receive(one), Err(FlowError::Overrun), "it was not told yet");
        flow.send();
        flow.receive(one).unwrap();
    }
}
