//! `nvidia-smi topo -m`: what joins the GPUs, and which CPUs are near.

use crate::matrix::Matrix;

/// Reads what `nvidia-smi topo -m` prints. Network cards are in the same matrix and are passed over.
pub(crate) fn read(text: &str) -> Option<Matrix> {
    Matrix::read(text, &["GPU"])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::LinkKind;

    #[test]
    fn gpus_and_network_cards_in_one_matrix() {
        let matrix = read(include_str!("../../tests/nvidia-smi/mixed-x4.topo.txt")).unwrap();
        let links: Vec<_> = matrix.links.iter().map(|(pair, link)| (*pair, link.to_string())).collect();
        let expected =
            [((0, 1), "NV12"), ((0, 2), "SYS"), ((0, 3), "NODE"), ((1, 2), "PXB"), ((1, 3), "PHB"), ((2, 3), "PIX")];
        assert_eq!(links, expected.map(|(pair, link)| (pair, link.to_owned())));
        assert_eq!(matrix.affinity[&0].to_string(), "0-31,64-95");
        assert_eq!(matrix.numa_node.get(&3), Some(&1));
    }

    #[test]
    fn one_gpu_beside_a_network_card() {
        let text = "        GPU0    NIC0    CPU Affinity    NUMA Affinity   GPU NUMA ID\n\
                    GPU0     X      PHB     0-251   0               N/A\nNIC0    PHB      X \n";
        let matrix = read(text).unwrap();
        assert!(matrix.links.is_empty());
        assert_eq!(matrix.affinity[&0].len(), 252);
        assert_eq!(matrix.numa_node[&0], 0);
    }

    #[test]
    fn an_older_tool_without_numa() {
        let text = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tPHB\t0-11\nGPU1\tPHB\t X \t0-11\n";
        let matrix = read(text).unwrap();
        assert_eq!(matrix.links[&(0, 1)], LinkKind::Phb);
        assert!(matrix.numa_node.is_empty());
    }

    #[test]
    fn where_the_two_ends_differ_the_slower_counts() {
        let text = "\tGPU0\tGPU1\nGPU0\t X \tNV2\nGPU1\tNV1\t X \n";
        assert_eq!(read(text).unwrap().links[&(0, 1)], LinkKind::NvLink { count: 1 });
    }

    #[test]
    fn a_link_that_is_not_known_is_named() {
        let matrix = read("\tGPU0\tGPU1\nGPU0\t X \tWARP\nGPU1\tWARP\t X \n").unwrap();
        assert_eq!(matrix.links[&(0, 1)], LinkKind::Unknown);
        assert_eq!(matrix.strange, ["WARP", "WARP"]);
    }
}
