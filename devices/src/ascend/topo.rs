//! `npu-smi info -t topo`: what joins the NPUs, and which CPUs are near.

use crate::matrix::Matrix;

/// Reads what `npu-smi info -t topo` prints; labels are `NPU<id>`, and `Phy-ID<id>` on cards of two chips (910_93).
pub(crate) fn read(text: &str) -> Option<Matrix> {
    Matrix::read(text, &["NPU", "Phy-ID"])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::LinkKind;

    #[test]
    fn eight_910b3_as_their_owner_printed_them() {
        let matrix = read(include_str!("../../tests/npu-smi/910b3x8.topo.txt")).unwrap();
        assert_eq!(matrix.links.len(), 28);
        assert!(matrix.links.values().all(|link| *link == LinkKind::Hccs));
        assert_eq!(matrix.affinity.len(), 8);
        assert_eq!(matrix.affinity[&0].to_string(), "144-167");
        assert_eq!(matrix.affinity[&7].to_string(), "48-71");
        assert!(matrix.strange.is_empty());
    }

    #[test]
    fn two_groups_of_four_are_told_from_a_full_mesh() {
        let matrix = read(include_str!("../../tests/npu-smi/910ax8.topo.txt")).unwrap();
        assert_eq!(matrix.links[&(0, 3)], LinkKind::Hccs);
        assert_eq!(matrix.links[&(0, 4)], LinkKind::Sys);
        assert_eq!(matrix.links[&(2, 6)], LinkKind::Pix);
        assert_eq!(matrix.links[&(4, 7)], LinkKind::Hccs);
    }

    #[test]
    fn cards_of_two_chips_are_labelled_by_physical_id() {
        let matrix = read(include_str!("../../tests/npu-smi/a3-container.topo.txt")).unwrap();
        assert_eq!(matrix.links.get(&(12, 13)), Some(&LinkKind::SameCard));
        assert_eq!(matrix.links.get(&(13, 14)), Some(&LinkKind::Hccs));
        assert!(matrix.affinity.is_empty());
    }

    #[test]
    fn one_card_has_processors_and_no_link() {
        let matrix = read("           NPU0       CPU Affinity\nNPU0       X          0-23\n").unwrap();
        assert!(matrix.links.is_empty());
        assert_eq!(matrix.affinity[&0].len(), 24);
    }

    #[test]
    fn a_machine_without_a_matrix_gives_none() {
        assert_eq!(read("This device does not support querying topo.\n"), None);
    }
}
