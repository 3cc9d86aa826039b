"""SGLang's HiCache without a GPU: host memory that is not pinned, copies by torch."""


def copy_with_torch(set_attribute=setattr) -> None:
    """Replace what of SGLang's host pool needs a GPU; set_attribute(object, name, value)."""
    from sglang.srt.mem_cache.pool_host import common
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    def backup(self, device_pool, host_indices, device_indices, io_backend):
        for layer in range(self.layer_num):
            self.k_buffer[layer][host_indices] = device_pool.k_buffer[layer][device_indices]
            self.v_buffer[layer][host_indices] = device_pool.v_buffer[layer][device_indices]

    def load(self, device_pool, host_indices, device_indices, layer, io_backend, **options):
        device_pool.k_buffer[layer][device_indices] = self.k_buffer[layer][host_indices]
        device_pool.v_buffer[layer][device_indices] = self.v_buffer[layer][host_indices]

    set_attribute(common, "_cuda_host_register", lambda *args: None)
    set_attribute(MHATokenToKVPoolHost, "backup_from_device_all_layer", backup)
    set_attribute(MHATokenToKVPoolHost, "load_to_device_per_layer", load)
