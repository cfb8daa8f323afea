#include "hang_detect/health/kernel_log.h"

#include <fstream>

#include <sys/stat.h>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace reft {
namespace kernel_log_test {

using ::testing::IsEmpty;
using ::testing::SizeIs;

TEST(XidOfRecord, ReadsTheFormsThatDriversHaveWritten) {
  const struct {
    const char* record;
    int number;
    int pid;
  } kRecords[] = {
      {"4,1234,98765,-;NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", 79, 0},
      {"4,1,2,-;NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has", 79, 0},
      {"3,1,2,-;NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, name=python, Ch 00000008", 31, 4711},
      {"4,1,2,c;NVRM: Xid (0000:3b:00): 13, pid='815', Graphics Exception", 13, 815},
      {"4,1,2,-;NVRM: Xid (PCI:0000:3b:00): 48\n SUBSYSTEM=pci\n DEVICE=+pci:0000:3b:00.0", 48, 0},
  };
  for (const auto& known : kRecords) {
    const auto xid = xidOfRecord(known.record);
    ASSERT_TRUE(xid) << known.record;
    EXPECT_EQ(xid->number, known.number);
    EXPECT_EQ(xid->pid, known.pid);
    EXPECT_EQ(xid->pci, "0000:3b:00");
    EXPECT_EQ(xid->count(), 1U);
  }
}

TEST(XidOfRecord, TakesNoLineThatAProcessWrote) {
  EXPECT_FALSE(xidOfRecord("12,1,2,-;NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."));
}

TEST(XidOfRecord, IgnoresOtherAndHostileText) {
  for (const char* record :
       {"", ";", "4", "4,1,2,-;", "4,1,2,-;eth0: link up", "NVRM: Xid (PCI:0000:3b:00): 79",
        "x;NVRM: Xid (PCI:0000:3b:00): 79", "-4;NVRM: Xid (PCI:0000:3b:00): 79",
        "4,1,2,-;usb: NVRM: Xid (PCI:0000:3b:00): 79, the name of a stick",
        "4,1,2,-;NVRM: Xid (PCI:0000:3b:00): ", "4,1,2,-;NVRM: Xid (PCI:0000:3b:00): x",
        "4,1,2,-;NVRM: Xid (PCI:0000:3b:00): -79",
        "4,1,2,-;NVRM: Xid (PCI:0000:3b:00): 99999999999", "4,1,2,-;NVRM: Xid ($(reboot)): 79",
        "4,1,2,-;NVRM: Xid (PCI:0000:3b:00", "4,1,2,-;NVRM: Xid ("}) {
    EXPECT_FALSE(xidOfRecord(record)) << record;
  }
  const auto xid = xidOfRecord("4,1,2,-;NVRM: Xid (PCI:0000:3b:00): 31, pid=99999999999999");
  ASSERT_TRUE(xid);
  EXPECT_EQ(xid->pid, 0);
}

TEST(KernelLog, CountsWhatComesBetweenTwoReads) {
  const std::string path = ::testing::TempDir() + "reft_kmsg_" + std::to_string(::getpid());
  std::ofstream file(path);
  KernelLog log(path);
  ASSERT_TRUE(log.readable());
  std::vector<XidSample> xids;
  log.read(xids);
  EXPECT_THAT(xids, IsEmpty());
  file << "6,1,1,-;eth0: link up\n4,2,2,-;NVRM: Xid (PCI:0000:3b:00): 31, pid=7\n"
          "4,3,3,-;NVRM: Xid (PCI:0000:3b:00): 31, pid=8\n4,4,4,-;NVRM: Xid (PCI:00"
       << std::flush;
  log.read(xids);
  ASSERT_THAT(xids, SizeIs(1));
  EXPECT_EQ(xids[0].from_kernel_log, 2U);
  EXPECT_EQ(xids[0].pid, 8);
  file << "00:3c:00): 79\n" << std::flush;
  xids.clear();
  log.read(xids);
  ASSERT_THAT(xids, SizeIs(1));
  EXPECT_EQ(xids[0].pci, "0000:3c:00");
  ::unlink(path.c_str());
}

TEST(KernelLog, KeepsOnlySoManyKinds) {
  std::vector<XidSample> xids;
  for (int number = 1; number < 200; ++number) {
    addXid(xids, {number, "0000:3b:00", 0, 0, 1});
    addXid(xids, {1, "0000:3b:00", 0, 0, 1});
  }
  EXPECT_THAT(xids, SizeIs(kMaxXids));
  EXPECT_EQ(xids[0].from_kernel_log, 200U);
}

TEST(KernelLog, IsNotReadableIfThereIsNone) {
  EXPECT_FALSE(KernelLog("/nonexistent/kmsg").readable());
  EXPECT_FALSE(KernelLog(::testing::TempDir()).readable());
  const std::string path = ::testing::TempDir() + "reft_kmsg_pipe_" + std::to_string(::getpid());
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  KernelLog pipe(path);
  EXPECT_FALSE(pipe.readable());
  std::vector<XidSample> xids;
  pipe.read(xids);
  EXPECT_THAT(xids, IsEmpty());
  ::unlink(path.c_str());
}

}  // namespace kernel_log_test
}  // namespace reft
