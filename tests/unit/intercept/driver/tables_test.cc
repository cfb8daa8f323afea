#include <gtest/gtest.h>

#include "intercept/driver/cuda_api.h"
#include "intercept/driver/dynamic_library.h"

namespace reft {
namespace tables_test {

TEST(DynamicLibrary, TakesTheFirstThatIsThere) {
  const DynamicLibrary library = DynamicLibrary::open({"libreft-nowhere.so", "libc.so.6"});
  ASSERT_TRUE(library);
  EXPECT_EQ(library.why(), "");
  EXPECT_NE(library.find("getpid"), nullptr);
  EXPECT_EQ(library.find("reft_has_no_such_function"), nullptr);
}

TEST(DynamicLibrary, AbsenceIsAStateWithAReason) {
  const DynamicLibrary library = DynamicLibrary::open({"libreft-nowhere.so"});
  EXPECT_FALSE(library);
  EXPECT_NE(library.why().find("libreft-nowhere.so"), std::string::npos);
  EXPECT_EQ(library.find("getpid"), nullptr);
}

// Holds on machines with and without a device.
TEST(Tables, AreAvailableOrSayWhy) {
  EXPECT_EQ(cudaApi().available(), cudaApi().why.empty());
  EXPECT_EQ(&cudaApi(), &cudaApi());
  EXPECT_FALSE(cudaApi().describe(1).empty());
}

}  // namespace tables_test
}  // namespace reft
