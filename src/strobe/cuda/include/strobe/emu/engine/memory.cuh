// Matrices that a warp loads and stores together, and copies that land late.
#include <strobe/emu/engine/block.cuh>
#include <strobe/emu/memory.cuh>

namespace strobe {
namespace emu {

struct MatrixLane {
  u32 address;
  Matrices matrices;
};

void check_matrix_rows(void** lanes, const char* op, Site site) {
  Block& b = block();
  const u32 first = b.running / 32 * 32;
  u32 address[32];
  for (u32 i = 0; i < 32; ++i) {
    address[i] = static_cast<MatrixLane*>(lanes[i])->address;
    check_shared(address[i], 16, 16, op, site, static_cast<int>(first + i));
  }
  for (u32 i = 0; i < 32; i += 8)
    b.counters.bank_conflicts += Block::extra_wavefronts(address + i, 0xff, 8, 16);  // 8 rows a phase
}

void load_matrices(u32 address, Matrices to, bool transpose, const char* op, Site site) {
  MatrixLane lane{address, to};
  block().converge(Scope::warp, op, true, site, &lane, [=](void** lanes) {
    Block& b = block();
    check_matrix_rows(lanes, op, site);
    b.counters.shared_bytes_read += 512;
    for (u32 m = 0; m < 4; ++m) {
      u16 rows[8][8];
      for (u32 i = 0; i < 8; ++i) {
        const u32 from = static_cast<MatrixLane*>(lanes[8 * m + i])->address;
        if (b.async) note_read(b.running / 32 * 32 + 8 * m + i, from, 16, Proxy::generic, op, site);
        memcpy(rows[i], shared_at(from), 16);
      }
      for (u32 i = 0; i < 32; ++i) {
        const u32 row = i / 4, column = 2 * (i % 4);
        *static_cast<MatrixLane*>(lanes[i])->matrices.regs[m] =
            transpose ? rows[column][row] | u32(rows[column + 1][row]) << 16
                      : rows[row][column] | u32(rows[row][column + 1]) << 16;
      }
    }
  });
}

void store_matrices(u32 address, u32x4 from, bool transpose, const char* op, Site site) {
  MatrixLane lane{address, {{&from.x, &from.y, &from.z, &from.w}}};
  block().converge(Scope::warp, op, true, site, &lane, [=](void** lanes) {
    Block& b = block();
    check_matrix_rows(lanes, op, site);
    b.counters.shared_bytes_written += 512;
    for (u32 m = 0; m < 4; ++m) {
      u16 rows[8][8];
      for (u32 i = 0; i < 32; ++i)
        for (u32 half = 0; half < 2; ++half) {
          const u16 x = u16(*static_cast<MatrixLane*>(lanes[i])->matrices.regs[m] >> (16 * half));
          const u32 row = i / 4, column = 2 * (i % 4) + half;
          (transpose ? rows[column][row] : rows[row][column]) = x;
        }
      for (u32 i = 0; i < 8; ++i) {
        const u32 to = static_cast<MatrixLane*>(lanes[8 * m + i])->address, thread = b.running / 32 * 32 + 8 * m + i;
        if (b.async) {
          check_overwrite(thread, to, 16, rows[i], op, site);
          note_write(thread, b.clock(thread)[thread], to, 16, false, true, site);
        }
        memcpy(shared_at(to), rows[i], 16);
      }
    }
  });
}

void copy_async(u32 dst, const void* src, bool valid, Site site) {
  Block& b = block();
  check_shared(dst, 16, 16, "cp_async_16", site);
  if (valid) check_global(src, 16, 16, false, "cp_async_16", site);
  b.counters.shared_bytes_written += 16;
  if (!b.async) {
    valid ? memcpy(shared_at(dst), src, 16) : memset(shared_at(dst), 0, 16);
    return;
  }
  check_overwrite(b.running, dst, 16, nullptr, "cp_async_16", site);
  note_write(b.running, b.clock(b.running)[b.running], dst, 16, true, true, site);
  poison(dst, 16);
  Thread& thread = b.self();
  thread.copies.push_back(CopyInFlight{dst, valid ? src : nullptr, thread.copy_groups + 1, site});
}

// The thread's copies of all but the last `pending` groups land; from its next barrier on, others may see them.
void wait_copies(u32 pending) {
  Block& b = block();
  Thread& thread = b.self();
  size_t kept = 0;
  for (const CopyInFlight& copy : thread.copies) {
    if (copy.group + pending > thread.copy_groups) {
      thread.copies[kept++] = copy;
      continue;
    }
    copy.src ? memcpy(shared_at(copy.dst), copy.src, 16) : memset(shared_at(copy.dst), 0, 16);
    note_write(b.running, b.clock(b.running)[b.running], copy.dst, 16, false, true, copy.site);
  }
  thread.copies.resize(kept);
}

void commit_copies() { ++self().copy_groups; }

}  // namespace emu
}  // namespace strobe
