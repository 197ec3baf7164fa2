//! Where a file is, and how its open is answered: read from the wire.

use crate::bytes::{Backing, Opened, Place, node_from_pb};
use crate::map::map_from_pb;
use crate::names::attr_of;
use ebb_types::{Errno, Name};
use ebb_wire::pb;

pub(crate) fn backing_from_pb(backing: pb::BackingRef) -> Result<Backing, Errno> {
    // A path that leaves the backing directory must not even be tried.
    for component in backing.path.split(|c| *c == b'/') {
        Name::new(component).map_err(|_| Errno::EPROTO)?;
    }
    Ok(Backing { path: backing.path, ino: backing.ino })
}

pub(crate) fn opened_from_pb(opened: pb::Opened) -> Result<Opened, Errno> {
    Ok(Opened {
        attr: attr_of(opened.attr)?,
        map: map_from_pb(opened.map.ok_or(Errno::EPROTO)?)?,
        backing: opened.backing.map(backing_from_pb).transpose()?,
        place: place_from_pb(opened.r#where.unwrap_or_default()),
        sole: opened.sole,
        seated: opened.seated,
        seat: node_from_pb(opened.seat),
        coupled: opened.coupled,
        held: opened.held,
    })
}

pub(crate) fn place_from_pb(d: pb::Description) -> Place {
    Place { path: d.path, model: d.model, couple: d.couple }
}
