"""Limits of the GPUs that the solver knows: PAT §5.2's S_smem, S_register, S, L and B."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GpuLimits:
    """One GPU. Sizes in bytes, latency in ns, bandwidth in bytes/ns.

    arch           compute capability * 10, the compiler's target
    smem_per_sm    shared memory of a multiprocessor, of which every CTA takes smem_reserved more
    smem_per_cta   the most that one CTA may ask for
    registers      32-bit registers of a multiprocessor, per warp in units of register_unit
    """

    name: str
    arch: int
    num_sms: int
    smem_per_sm: int
    smem_per_cta: int
    latency_ns: float
    bandwidth: float
    smem_reserved: int = 1024
    registers: int = 65536
    registers_per_thread: int = 255
    register_unit: int = 256
    threads_per_sm: int = 2048
    ctas_per_sm: int = 32

    @property
    def bytes_in_flight(self) -> float:
        """What must be under way at any time to keep device memory busy: L * B."""
        return self.latency_ns * self.bandwidth

    def registers_of(self, registers_per_thread: int, num_warps: int) -> int:
        """Return how many registers a CTA occupies."""
        per_warp = 32 * registers_per_thread
        return num_warps * -(-per_warp // self.register_unit) * self.register_unit

    def resident_ctas(self, registers_per_thread: int, num_warps: int, smem: int) -> int:
        """Return how many CTAs fit a multiprocessor at once (PAT's C)."""
        return min(
            self.registers // self.registers_of(max(registers_per_thread, 1), num_warps),
            self.smem_per_sm // (smem + self.smem_reserved),
            self.threads_per_sm // (32 * num_warps),
            self.ctas_per_sm,
        )


# Sizes from NVIDIA's tuning guides and data sheets (SXM parts). Latencies of a load that misses all
# caches, from pointer chasing: 479 cycles at 1.755 GHz and 466 at 1.41 GHz (arXiv:2402.13499).
GPUS = {
    gpu.name: gpu
    for gpu in (
        GpuLimits("H100", 90, 132, 233472, 232448, latency_ns=273, bandwidth=3350),
        GpuLimits("H200", 90, 132, 233472, 232448, latency_ns=273, bandwidth=4800),
        GpuLimits("A100", 80, 108, 167936, 166912, latency_ns=331, bandwidth=2039),
    )
}
